"""TPOT and hit rate by policy and cache size, beside the references (as the paper's figure 5).

Reads a results table: policy, slots, tpot_ns, hit_rate and the references of every row.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import style

NEEDS = ("policy", "slots", "tpot_ns", "hit_rate")
TIMES = ("ideal", "all_resident", "bound_relaxed", "ref_belady_uniform")


def draw(table: pd.DataFrame) -> Figure:
    """One column of panels a cache size: TPOT above, hit rate below."""
    sizes = list(dict.fromkeys(table["slots"]))
    policies = sorted(dict.fromkeys(table["policy"]), key=_place)
    with style.styled():
        figure = Figure(figsize=(style.COLUMN_IN, 3.5))
        panels = figure.subplots(2, len(sizes), sharey="row", squeeze=False)
        for size, (upper, lower) in zip(sizes, panels.T, strict=True):
            rows = table[table["slots"] == size].set_index("policy")
            shown = [policy for policy in policies if policy in rows.index]
            style.bars(upper, shown, [rows.at[p, "tpot_ns"] / 1e6 for p in shown])
            style.bars(lower, shown, [rows.at[p, "hit_rate"] for p in shown])
            for name in TIMES:
                _reference(upper, rows, name, "tpot_ns", 1e-6)
            _reference(lower, rows, "ref_belady_uniform", "hit_rate", 1.0)
            upper.set_title(f"{size} slots a layer")
            lower.set_ylim(0, 1)
        panels[0, 0].set_ylabel("TPOT (ms)")
        panels[1, 0].set_ylabel("hit rate")
        _legend(figure, policies, table)
    return figure


def _place(policy: str) -> tuple[int, str]:
    known = list(style.POLICIES)
    return (known.index(policy) if policy in known else len(known), policy)


def _reference(axes: Axes, rows: pd.DataFrame, name: str, metric: str, scale: float) -> None:
    column = f"{name}_{metric}"
    if column in rows:
        line = style.REFERENCES[name]
        axes.axhline(rows[column].iloc[0] * scale, color=line.color, ls=line.dashes, lw=line.width)


def _legend(figure: Figure, policies: list[str], table: pd.DataFrame) -> None:
    shapes = [style.look(policy) for policy in policies]
    patches = [
        Patch(facecolor=s.color, hatch=s.hatch, edgecolor="black", label=s.label) for s in shapes
    ]
    lines = [
        Line2D([], [], color=line.color, ls=line.dashes, lw=line.width, label=line.label)
        for name, line in style.REFERENCES.items()
        if f"{name}_tpot_ns" in table
    ]
    figure.legend(handles=[*patches, *lines], loc="outside lower center", ncols=3)
