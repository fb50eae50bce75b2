"""Time to the first token by system, a panel a shape, a group of bars a workload.

Reads a results table: policy, trace.geometry, trace.workload, prefill_ns.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "trace.geometry", "trace.workload", "prefill_ns")


def draw(table: pd.DataFrame) -> Figure:
    """Draw bars in the order of the table."""
    table = table.assign(
        shape=style.shape(table), **{"trace.workload": table["trace.workload"].fillna("")}
    )
    shapes = list(dict.fromkeys(table["shape"]))
    policies = list(dict.fromkeys(table["policy"]))
    width = 0.85 / len(policies)
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 2.6))
        panels = figure.subplots(1, len(shapes), squeeze=False)[0]
        for shape, axes in zip(shapes, panels, strict=True):
            rows = table[table["shape"] == shape]
            workloads = list(dict.fromkeys(rows["trace.workload"]))
            for number, policy in enumerate(policies):
                look = style.look(policy)
                own = rows[rows["policy"] == policy].set_index("trace.workload")
                axes.bar(
                    [place + width * (number - len(policies) / 2) for place in range(len(own))],
                    (own.loc[workloads, "prefill_ns"] / 1e6).to_list(),
                    width,
                    color=look.color,
                    hatch=look.hatch,
                    edgecolor="black",
                    linewidth=0.3,
                )
            axes.set_xticks(range(len(workloads)), workloads)
            axes.set_title(shape)
        panels[0].set_ylabel("TTFT (ms)")
        handles = style.patches(policies)
        figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure
