"""Measure what a change of the routed experts does to a model's text."""
