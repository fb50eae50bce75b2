"""Retention: a score for every expert of a layer; the lowest leaves first."""
