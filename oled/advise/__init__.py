"""What of a model fits a machine, and what to run on it."""
