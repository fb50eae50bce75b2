"""Dispatch: which misses are copied and which are computed on the CPU."""
