"""Measure this machine: single calls of a backend, and a hardware profile of them."""
