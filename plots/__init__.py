"""One file per figure, each reading a results table only."""
