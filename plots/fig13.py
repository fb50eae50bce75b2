"""TPOT of every system over OLED's, a panel a shape and cache size.

Reads a results table: policy, trace.geometry, trace.workload, hardware, runtime, slots, tpot_ns.
Bars are means over the workloads on the main machine with graph_fused; error bars go from the
least to the greatest over workloads and the ends of the machine's profile.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "trace.geometry", "trace.workload", "hardware", "runtime", "slots", "tpot_ns")
PLACE = ["trace.workload", "hardware"]
SPREAD = "bars: mean over workloads; error bars: least and greatest, the machine's ends included"


def draw(table: pd.DataFrame) -> Figure:
    """Draw TPOT over OLED's; above one is slower."""
    graph = table[table["runtime"] == "graph_fused"]
    graph = graph.assign(
        shape=style.shape(graph), **{"trace.workload": graph["trace.workload"].fillna("")}
    )
    shapes = list(dict.fromkeys(graph["shape"]))
    columns = max(graph.groupby("shape")["slots"].nunique())
    policies = [policy for policy in dict.fromkeys(graph["policy"]) if policy != "oled"]
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 0.9 + 1.4 * len(shapes)))
        panels = figure.subplots(len(shapes), columns, squeeze=False)
        for shape, line in zip(shapes, panels, strict=True):
            rows = graph[graph["shape"] == shape]
            for size, axes in zip(dict.fromkeys(rows["slots"]), line, strict=True):
                _bars(axes, rows[rows["slots"] == size], policies)
                axes.set_title(f"{shape}, {size} slots a layer")
            line[0].set_ylabel("TPOT over OLED's")
        handles = [*style.patches(policies), *style.references(["ideal"])]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, title=SPREAD)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame, policies: list[str]) -> None:
    machine = rows["hardware"].str.partition("@")[0].iloc[0]
    rows = rows[rows["hardware"].str.startswith(machine)]
    by = rows.pivot_table("tpot_ns", PLACE, "policy")
    over = by.div(by["oled"], axis=0)
    usual = over[over.index.get_level_values("hardware") == machine]
    means = [float(usual[policy].mean()) for policy in policies]
    style.bars(axes, policies, means)
    spread = [
        [mean - float(over[p].min()) for p, mean in zip(policies, means, strict=True)],
        [float(over[p].max()) - mean for p, mean in zip(policies, means, strict=True)],
    ]
    axes.errorbar(range(len(policies)), means, spread, fmt="none", ecolor="black", elinewidth=0.7)
    axes.axhline(1, color=style.look("oled").color, lw=1.2)
    ideal = rows[rows["hardware"] == machine].drop_duplicates(PLACE).set_index(PLACE)
    line = style.REFERENCES["ideal"]
    height = float((ideal["ideal_tpot_ns"] / by["oled"]).mean())
    axes.axhline(height, color=line.color, ls=line.dashes, lw=line.width, zorder=1)
    axes.set_ylim(0)
