"""TPOT of every system, a row of panels a trace: two cache sizes, and several GPUs.

Reads a results table: system, side, slots, topology, tpot_ns, references. Of a rule that changes
routes the live run is drawn where there is one.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("system", "side", "slots", "topology", "tpot_ns", "all_resident_tpot_ns")
DRAWN = ("all_resident", "bound_relaxed")
REPLAYED = ", replayed"


def draw(table: pd.DataFrame) -> Figure:
    """Draw bars in ms; lines are the references of the same trace."""
    cached, several = (table[table["topology"].isna() == own] for own in (True, False))
    cached = _one_each(cached)
    sides = list(dict.fromkeys(cached["side"]))
    sizes = max(cached.groupby("side")["slots"].nunique())
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 1.2 + 1.7 * len(sides)))
        ratios = [*[3] * sizes, 2]
        panels = figure.subplots(len(sides), sizes + 1, squeeze=False, width_ratios=ratios)
        for side, line in zip(sides, panels, strict=True):
            own = cached[cached["side"] == side]
            for slots, axes in zip(sorted(own["slots"].unique(), key=int), line, strict=False):
                _bars(axes, own[own["slots"] == slots])
                axes.set_title(f"{side}, {slots} slots a layer")
            _several(line[-1], several[several["side"] == side])
            line[0].set_ylabel("TPOT (ms)")
        names = [*dict.fromkeys(cached["drawn"]), *dict.fromkeys(several["system"])]
        handles = [*style.patches(names), *style.references(DRAWN)]
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _one_each(cached: pd.DataFrame) -> pd.DataFrame:
    """Draw a row a system, trace and size: live before replayed."""
    drawn = cached["system"].str.removesuffix(REPLAYED)
    cached = cached.assign(drawn=drawn, last=cached["system"] != drawn)
    cached = cached.sort_values("last", kind="stable")
    return cached.drop_duplicates(["side", "slots", "drawn"]).sort_index()


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    style.bars(axes, rows["drawn"].to_list(), (rows["tpot_ns"] / 1e6).to_list())
    for name in DRAWN:
        line = style.REFERENCES[name]
        height = float(rows[f"{name}_tpot_ns"].iloc[0]) / 1e6
        axes.axhline(height, color=line.color, ls=line.dashes, lw=line.width)


def _several(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw groups of bars, one a topology."""
    topologies = list(dict.fromkeys(rows["topology"]))
    for place, topology in enumerate(topologies):
        own = rows[rows["topology"] == topology]
        for number, (system, tpot) in enumerate(
            zip(own["system"], own["tpot_ns"], strict=True), start=-1
        ):
            shape = style.look(system)
            axes.bar(
                place + 0.26 * number,
                tpot / 1e6,
                0.25,
                color=shape.color,
                hatch=shape.hatch,
                edgecolor="black",
            )
    axes.set_xticks(range(len(topologies)), topologies, fontsize=6, rotation=20)
    batch = int(rows["batch_size"].iloc[0])
    axes.set_title(f"several GPUs, {batch} request{'s' if batch > 1 else ''}")
