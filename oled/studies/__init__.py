"""The demo, and the studies of experiments/studies/ with their figures."""
