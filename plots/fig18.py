"""TPOT by link bandwidth, a row a shape, a panel a cache size.

Reads a results table: policy, trace.geometry, slots, hardware.h2d_pinned, tpot_ns and the
references; rows on the machine's own link are not drawn.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

LINK = "hardware.h2d_pinned"
NEEDS = ("policy", "trace.geometry", "slots", LINK, "tpot_ns", "ideal_tpot_ns")
DRAWN = ("ideal", "bound_relaxed", "ref_belady_uniform")


def draw(table: pd.DataFrame) -> Figure:
    """Draw both axes logarithmic: a law of the link is a straight line."""
    table = table[table[LINK].notna()]
    link = [float(text.split()[0]) for text in table[LINK]]
    table = table.assign(link=link, shape=style.shape(table)).sort_values("link", kind="stable")
    shapes = list(dict.fromkeys(table["shape"]))
    policies = list(dict.fromkeys(table["policy"]))
    with style.styled():
        figure = Figure(figsize=(style.COLUMN_IN, 1.3 + 1.8 * len(shapes)))
        columns = max(table.groupby("shape")["slots"].nunique())
        panels = figure.subplots(len(shapes), columns, sharex=True, sharey="row", squeeze=False)
        for shape, line in zip(shapes, panels, strict=True):
            rows = table[table["shape"] == shape]
            for size, axes in zip(sorted(set(rows["slots"]), key=int), line, strict=True):
                _lines(axes, rows[rows["slots"] == size], policies)
                axes.set_title(f"{shape}\n{size} slots a layer", fontsize=7)
            line[0].set_ylabel("TPOT (ms)")
        for axes in panels[-1]:
            axes.set_xlabel("host to GPU (GB/s)")
        style.legend(figure, policies, DRAWN, 2)
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, policies: list[str]) -> None:
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
