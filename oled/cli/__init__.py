"""The command line: argument handling and nothing else. Nothing imports it."""
