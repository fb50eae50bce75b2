"""Decode times that people measured, and what is predicted from their settings.

Left: predicted over measured, a mark a row, filled for groups that were judged and hollow for those
of development. Right: one panel for each of four groups, along its settings by measured time.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("id", "group", "split", "kind", "measured_ms", "predicted_ms", "low_ms", "high_ms")
KINDS = {
    "bench, consumer": ("#08306b", "o"),
    "bench, server": ("#6baed6", "s"),
    "bench, by parts": ("#9e9ac8", "v"),
    "host probed": ("#d94801", "^"),
    "parts named": ("#969696", "D"),
}
"""Colour and marker of each class."""


def draw(table: pd.DataFrame) -> Figure:
    """Return the scatter and the four largest groups of different classes."""
    found = table[table["predicted_ms"].notna()]
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 3.4))
        panels = figure.subplot_mosaic("AABC;AADE")
        _scatter(panels["A"], found)
        for axes, (name, part) in zip(
            [panels[key] for key in "BCDE"], _examples(found), strict=False
        ):
            _curve(axes, name, part)
    return figure


def _scatter(axes: Axes, found: pd.DataFrame) -> None:
    ends = 0.8 * found["measured_ms"].min(), 1.25 * found["measured_ms"].max()
    line = np.array(ends)
    axes.fill_between(line, line / 1.2, line * 1.2, color="0.92", lw=0, label="within 20 %")
    axes.plot(line, line, color="0.4", lw=0.7)
    for kind, (color, marker) in KINDS.items():
        for split, face in (("judgement", color), ("development", "none")):
            own = found[(found["kind"] == kind) & (found["split"] == split)]
            label = kind if split == "judgement" else None
            axes.plot(
                own["measured_ms"], own["predicted_ms"], ls="", marker=marker, ms=2.8, mew=0.5,
                mec=color, mfc=face, label=label,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured (ms a token)")
    axes.set_ylabel("predicted (ms a token)")
    title = "filled: judged; hollow: development"
    axes.legend(loc="lower right", fontsize=6, title=title, title_fontsize=6)


def _examples(found: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the largest judged group of each class, then the next largest."""
    own = found[found["split"] == "judgement"]
    sizes = own.groupby(["kind", "group"]).size().sort_values(ascending=False, kind="stable")
    first = sizes[~sizes.index.get_level_values("kind").duplicated()]
    order = list(dict.fromkeys([*first.index, *sizes.index]))[:4]
    return [(group, own[(own["group"] == group) & (own["kind"] == kind)]) for kind, group in order]


def _curve(axes: Axes, name: str, part: pd.DataFrame) -> None:
    part = part.sort_values("measured_ms", kind="stable")
    place = np.arange(len(part))
    axes.fill_between(place, part["low_ms"], part["high_ms"], color="0.9", lw=0)
    axes.plot(place, part["predicted_ms"], color="#08306b", lw=0.9)
    axes.plot(place, part["measured_ms"], color="black", ls="", marker=".", ms=2.5)
    axes.set_title(name, loc="left", fontsize=6)
    axes.set_xticks([])
    axes.set_ylim(0, None)
    axes.set_ylabel("ms", fontsize=6)
