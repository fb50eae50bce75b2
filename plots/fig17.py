"""TPOT by GPU memory of the experts, a panel a shape and runtime.

Reads a results table: policy, trace.geometry, runtime, gpu_bytes_total, tpot_ns, references.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "trace.geometry", "runtime", "gpu_bytes_total", "tpot_ns", "ideal_tpot_ns")
DRAWN = ("ideal", "bound_relaxed", "ref_belady_uniform")


def draw(table: pd.DataFrame) -> Figure:
    """Draw a row a shape, a column a runtime."""
    table = table.assign(shape=style.shape(table))
    shapes = list(dict.fromkeys(table["shape"]))
    runtimes = list(dict.fromkeys(table["runtime"]))
    policies = list(dict.fromkeys(table["policy"]))
    with style.styled():
        figure = Figure(figsize=(style.COLUMN_IN, 1.0 + 1.5 * len(shapes)))
        panels = figure.subplots(len(shapes), len(runtimes), squeeze=False, sharex="row")
        for shape, line in zip(shapes, panels, strict=True):
            for runtime, axes in zip(runtimes, line, strict=True):
                own = (table["shape"] == shape) & (table["runtime"] == runtime)
                rows = table[own].sort_values("gpu_bytes_total")
                for policy in policies:
                    part = rows[rows["policy"] == policy]
                    memory = (part["gpu_bytes_total"] / 2**30).to_list()
                    style.line(axes, policy, memory, (part["tpot_ns"] / 1e6).to_list())
                for name in DRAWN:
                    heights = (part[f"{name}_tpot_ns"] / 1e6).to_list()
                    style.reference(axes, name, memory, heights)
                style.logarithmic(axes)
                axes.set_title(f"{shape}\n{runtime}", fontsize=7)
            line[0].set_ylabel("TPOT (ms)")
        for axes in panels[-1]:
            axes.set_xlabel("expert memory (GiB)")
        style.legend(figure, policies, DRAWN, 2)
    return figure
