"""TPOT by link bandwidth, a panel a cache size.

Reads a results table: policy, slots, hardware.h2d_pinned, tpot_ns and the references.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "slots", "hardware.h2d_pinned", "tpot_ns", "ideal_tpot_ns")
DRAWN = ("ideal", "bound_relaxed", "ref_belady_uniform")


def draw(table: pd.DataFrame) -> Figure:
    """Both axes logarithmic: a law of the link is a straight line."""
    table = table.assign(link=[float(text.split()[0]) for text in table["hardware.h2d_pinned"]])
    policies = list(dict.fromkeys(table["policy"]))
    with style.styled():
        figure = Figure(figsize=(style.COLUMN_IN, 3.2))
        sizes = list(dict.fromkeys(table["slots"]))
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, size in zip(panels, sizes, strict=True):
            rows = table[table["slots"] == size].sort_values("link")
            for policy in policies:
                own = rows[rows["policy"] == policy]
                style.line(axes, policy, own["link"].to_list(), (own["tpot_ns"] / 1e6).to_list())
            one = rows[rows["policy"] == policies[0]]
            for name in DRAWN:
                heights = (one[f"{name}_tpot_ns"] / 1e6).to_list()
                style.reference(axes, name, one["link"].to_list(), heights)
            axes.set_xscale("log", base=2)
            style.logarithmic(axes)
            links = sorted(set(rows["link"]))
            axes.set_xticks(links, [f"{link:g}" for link in links])
            axes.set_title(f"{size} slots a layer")
            axes.set_xlabel("host to GPU (GB/s)")
        panels[0].set_ylabel("TPOT (ms)")
        style.legend(figure, policies, DRAWN, 2)
    return figure
