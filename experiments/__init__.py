"""Studies: one small file each, what is swept and on which traces; and how the model was made."""
