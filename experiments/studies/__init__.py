"""The studies: a file each, with a figure of the same name in plots/. They ship in the wheel."""
