"""Bundled traces; a package so that they are found once installed (see setup.py)."""
