"""Placements, one file each."""
