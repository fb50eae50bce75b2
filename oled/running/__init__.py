"""A model at work: its modules, decoding loops, hooks, and what they saw."""
