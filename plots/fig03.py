"""Timelines of one forward under several policies, on one time axis.

Reads slices: policy, lane, what, begin_us, length_us.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from . import style

NEEDS = ("policy", "lane", "what", "begin_us", "length_us")
LANES = ("GPU compute", "H2D link", "CPU workers")
KINDS = {  # slice: colour, hatch
    "dense": ("#d9d9d9", ""),
    "hits": ("#fdae6b", ""),
    "landed": ("#a63603", ""),
    "copy": ("#4292c6", "////"),
    "prefetch": ("#9ecae1", "...."),
    "cpu experts": ("#31a354", "xxxx"),
}


def draw(table: pd.DataFrame) -> Figure:
    """Draw a panel a policy, a bar a lane; the first milliseconds, so that slices can be seen."""
    policies = list(dict.fromkeys(table["policy"]))
    ends = (table["begin_us"] + table["length_us"]).groupby(table["policy"]).max()
    shown = float(ends.min()) / 1e3
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 0.8 + 0.75 * len(policies)))
        panels = figure.subplots(len(policies), 1, sharex=True, squeeze=False)[:, 0]
        for policy, axes in zip(policies, panels, strict=True):
            for place, lane in enumerate(reversed(LANES)):
                rows = table[(table["policy"] == policy) & (table["lane"] == lane)]
                for what, (color, hatch) in KINDS.items():
                    own = rows[(rows["what"] == what) & (rows["begin_us"] < 1e3 * shown)]
                    spans = [
                        (a / 1e3, b / 1e3)
                        for a, b in zip(own["begin_us"], own["length_us"], strict=True)
                    ]
                    axes.broken_barh(
                        spans, (place - 0.4, 0.8), facecolor=color, hatch=hatch, ec="black", lw=0.2
                    )
            axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
            axes.grid(visible=False)
            axes.set_title(
                f"{style.look(policy).label}: forward of {ends[policy] / 1e3:.1f} ms", loc="left"
            )
        panels[-1].set_xlim(0, shown)
        panels[-1].set_xlabel("time in the forward (ms); longer forwards are cut off")
        handles = [
            Patch(facecolor=color, hatch=hatch, edgecolor="black", label=what)
            for what, (color, hatch) in KINDS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(KINDS))
    return figure
