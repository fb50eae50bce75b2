"""Several GPUs: the layout of experts, the cost of imbalance and all-to-all, the worth of moves.

The clock is not that of `oled.sim`: every expert is on some GPU and nothing is offloaded. Metrics,
result and printed table are those of `oled.sim`.
"""
