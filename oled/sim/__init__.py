"""The simulator: the clock, its lanes, and what is counted."""
