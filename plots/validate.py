"""Live time of every configuration against the simulated one, with bands of 5 and 10 percent.

From the `report.json` of `oled validate`: left the time a token, right the errors by policy, each
number of slots a point, and a bar as wide as the P95 of its forwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .style import PAGE_IN, look, styled

NEEDS = ("configurations", "verdict", "tpot_error_max_abs", "undisturbed_share")
GATES = {"tpot_error": 0.02, "forward_error_p95_abs": 0.03}


def draw(report: Mapping[str, Any]) -> Figure:
    """Draw the figure; configurations without an undisturbed forward are left out."""
    rows = [row for row in report["configurations"] if row["tpot_error"] is not None]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    with styled():
        height = max(3.0, 0.14 * len(policies) + 0.8)
        figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE_IN, height))
        if not rows:
            left.text(0.5, 0.5, "no undisturbed forward", ha="center", transform=left.transAxes)
            return figure
        times = np.array([(r["simulated_tpot_ns"], r["live_tpot_ns"]) for r in rows]) / 1e6
        ends = np.array([0.9 * times.min(), 1.1 * times.max()])
        for band, shade in ((0.10, "#eeeeee"), (0.05, "#dddddd")):
            label = f"within {band:.0%}"
            left.fill_between(
                ends, ends * (1 - band), ends * (1 + band), color=shade, lw=0, label=label
            )
        left.plot(ends, ends, color="black", lw=0.6, label="equal")
        seen: dict[str, int] = {}
        for time, row in zip(times, rows, strict=True):
            shape = look(row["policy"])
            style: dict[str, Any] = {"color": shape.color, "marker": shape.marker, "linestyle": ""}
            style |= {"markersize": 4, "markeredgewidth": 0.4, "markeredgecolor": "black"}
            left.plot(*time, **style)
            turn = seen.get(row["policy"], 0)
            seen[row["policy"]] = turn + 1
            place = policies.index(row["policy"]) + 0.22 * (turn % 4 - 1)
            right.plot(100 * row["tpot_error"], place, **style)
            p95 = 100 * row["forward_error_p95_abs"]
            right.plot([-p95, p95], [place, place], color="black", lw=0.4)
        left.set(xscale="log", yscale="log", xlabel="simulated TPOT (ms)", ylabel="live TPOT (ms)")
        left.legend(fontsize=5)
        for side in (-1, 1):
            right.axvline(side * 100 * GATES["tpot_error"], color="grey", lw=0.6, ls="--")
        right.set_yticks(range(len(policies)), [look(policy).label for policy in policies])
        right.tick_params(axis="y", labelsize=5)
        right.invert_yaxis()
        right.set(xlabel="TPOT error (%), bar: P95 of forwards")
        right.set_title(
            f"{report['verdict']}: at most {report['tpot_error_max_abs']:.2%}, "
            f"{report['undisturbed_share']:.0%} of forwards undisturbed",
            fontsize=6,
        )
        return figure
