"""The Hydra configuration; a package so that it is found once installed (see setup.py)."""
