"""TPOT and hit rate of the prior systems against the ideal, at 40 slots a layer.

Of mini and flash, and of the bundled model's recording at the same share of its experts.
"""

from __future__ import annotations

import pandas as pd

from oled.bundled.plots.fig05 import draw
from oled.bundled.plots.style import shape
from oled.bundled.studies import common
from oled.studies.reproduce import Claim, Run, judge, judge_range, markdown, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 5: prior systems against the ideal"


def rows(run: Run) -> pd.DataFrame:
    axes = {"policy": [*common.SYSTEMS, "inter_iteration", "oled"], "runtime": common.RUNTIMES}
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    base = common.for_systems(run.small, 16) | {"cache.slots": 40} | axes
    return run.sweep(
        [*(base | one for one in shapes), common.RECORDED | {"cache.slots": 20} | axes]
    )


def over_ideal(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(
        over=table["tpot_ns"] / table["ideal_tpot_ns"],
        place=shape(table) + ", " + table["runtime"],
    )


def summary(table: pd.DataFrame) -> str:
    shown = over_ideal(table)
    shown["cell"] = [
        f"{tpot / 1e6:.1f} ms, {over:.2f} x, {hit:.3f}"
        for tpot, over, hit in shown[["tpot_ns", "over", "hit_rate"]].to_numpy()
    ]
    return (
        "TPOT, over the ideal, hit rate; 40 slots a layer, 20 of the bundled model's.\n\n"
        + markdown(wide(shown, ["policy"], "place", "cell"))
    )


def claims(table: pd.DataFrame) -> list[Claim]:
    prior = over_ideal(table[table["policy"].isin(common.SYSTEMS)])
    lines = []
    for place, part in prior.groupby("place", sort=False):
        ours = float(part["over"].min()), float(part["over"].max())
        lines.append(
            Claim(
                f"TPOT of prior systems over the ideal, {place}",
                "1.70 to 8.16",
                f"{ours[0]:.2f} to {ours[1]:.2f}",
                judge_range((1.70, 8.16), ours),
                "what decides: the runtime's share of a forward (the maximum), CPU speed (minimum)",
            )
        )
    for whose, part in prior[prior["policy"].isin(common.PAPERS)].groupby(
        prior["trace.geometry"].isna().map({False: "made-up models", True: "bundled model"})
    ):
        hits = float(part["hit_rate"].mean())
        lines.append(
            Claim(
                f"utilisation (read as hit rate) of prior systems, mean, {whose}",
                "0.515",
                f"{hits:.3f}",
                judge(0.515, hits),
                "the paper's definition of utilisation is not public",
            )
        )
    return lines
