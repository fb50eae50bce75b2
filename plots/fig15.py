"""Ablation, retentions against Belady by capacity, and allocations against uniform slots.

Reads a results table: policy, slots, trace.process, cpu_kernel, runtime, tpot_ns, hit_rate.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "slots", "trace.process", "cpu_kernel", "runtime", "tpot_ns", "hit_rate")
ABLATION = ("naive_lru", "inter_iteration", "oled_priority", "oled_layeradapt", "oled")
RETENTIONS = ("lru", "lfu", "lrfu", "inter_iteration", "state_gate", "oled_priority")
ALLOCATIONS = ("oled_layeradapt", "oled_marginal")
DISPATCH = "policy.dispatch._target_"


def draw(table: pd.DataFrame) -> Figure:
    """Draw a row of panels a process (layers even, uneven)."""
    table = table[table["trace.process"].notna()]
    if DISPATCH in table:
        table = table[table[DISPATCH].isna()]
    usual = (table["cpu_kernel"] == "tuned") & (table["runtime"] == "graph_fused")
    processes = list(dict.fromkeys(table["trace.process"]))
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 4.2))
        panels = figure.subplots(len(processes), 3, squeeze=False)
        for process, (left, middle, right) in zip(processes, panels, strict=True):
            own = table["trace.process"] == process
            _steps(left, table[own])
            _hits(middle, table[own & usual])
            _allocations(right, table[own & usual])
            left.set_title(f"layers {process}: ablation, 40 slots")
            middle.set_title("hit rate by capacity")
            right.set_title("TPOT saved on uniform slots")
        bars = style.patches(ABLATION)
        figure.legend(handles=bars, loc="outside upper center", ncols=5)
        style.legend(figure, dict.fromkeys([*RETENTIONS, *ALLOCATIONS]), (), 4)
    return figure


def _steps(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw bars in groups, one a cost point, each over that point's naive LRU."""
    rows = rows[rows["slots"] == "40"]
    points = list(dict.fromkeys(zip(rows["cpu_kernel"], rows["runtime"], strict=True)))
    labels = []
    for place, (kernel, runtime) in enumerate(points):
        own = rows[(rows["cpu_kernel"] == kernel) & (rows["runtime"] == runtime)]
        tpot = own.drop_duplicates("policy").set_index("policy")["tpot_ns"]
        if "naive_lru" not in tpot:
            continue
        for number, policy in enumerate(ABLATION):
            shape = style.look(policy)
            axes.bar(
                place + 0.16 * (number - 2),
                tpot[policy] / tpot["naive_lru"],
                0.15,
                color=shape.color,
                hatch=shape.hatch,
                edgecolor="black",
            )
        labels.append(f"{kernel} CPU\n{runtime}")
    axes.set_xticks(range(len(labels)), labels, fontsize=6)
    axes.set_ylabel("TPOT over naive LRU")
    axes.set_ylim(0, 1.05)


def _hits(axes: Axes, rows: pd.DataFrame) -> None:
    best = dict(zip(*_curve(rows, "oracle", "hit_rate"), strict=True))
    for policy in RETENTIONS:
        own = dict(zip(*_curve(rows, policy, "hit_rate"), strict=True))
        places = [slots for slots in own if slots in best]
        style.line(axes, policy, places, [100 * (best[slots] - own[slots]) for slots in places])
    axes.set_ylim(0)
    axes.set_xlabel("slots a layer")
    axes.set_ylabel("points below Belady")


def _allocations(axes: Axes, rows: pd.DataFrame) -> None:
    places, uniform = _curve(rows, "oled_priority", "tpot_ns")
    for policy in ALLOCATIONS:
        by_slots = dict(zip(*_curve(rows, policy, "tpot_ns"), strict=True))
        saved = [
            100 * (1 - by_slots[slots] / tpot)
            for slots, tpot in zip(places, uniform, strict=True)
            if slots in by_slots
        ]
        style.line(axes, policy, [slots for slots in places if slots in by_slots], saved)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xlabel("slots a layer")
    axes.set_ylabel("TPOT saved (%)")


def _curve(rows: pd.DataFrame, policy: str, value: str) -> tuple[list[int], list[float]]:
    own = rows[rows["policy"] == policy].drop_duplicates("slots")
    own = own.assign(number=own["slots"].astype(int)).sort_values("number")
    return own["number"].to_list(), own[value].to_list()
