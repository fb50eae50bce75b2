"""Prefetch: copies asked for before their experts are needed."""
