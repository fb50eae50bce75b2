"""Allocation: the slots of every layer under one budget."""
