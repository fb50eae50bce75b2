"""Several GPUs: where experts are, what imbalance and all-to-all cost, what moving experts is
worth.

A clock of its own, beside `oled.sim`: here every expert is on some GPU and nothing is offloaded.
"""
