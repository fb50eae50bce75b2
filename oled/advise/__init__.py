"""Say which parts of a model fit a machine, and what to run on it."""
