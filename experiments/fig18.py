"""PCIe bandwidth and cache size: TPOT under the inter-iteration cache, OLED and CPU systems."""

from __future__ import annotations

import pandas as pd

from oled._experiments import common
from oled._plots.fig18 import draw
from oled.studies import UNKNOWN, Claim, Run, markdown, percent, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 18: link bandwidth and cache size"
GB_PER_S = [4, 8, 16, 32, 64, 128]
POLICIES = [
    "inter_iteration",
    "llama_cpp_cache",
    "ktransformers",
    "oled_layeradapt",
    "oled",
    "oled_fill",
]


def rows(run: Run) -> pd.DataFrame:
    links = [8, 32] if run.small else GB_PER_S
    axes = {
        "hardware.h2d_pinned": [f"{speed} GB/s" for speed in links],
        "cache.slots": [40, 100],
        "policy": POLICIES,
    }
    return run.sweep(axes, common.synthetic(run.small) | common.MINI)


def summary(table: pd.DataFrame) -> str:
    shown = table.assign(
        cell=[f"{tpot / 1e6:.2f}" for tpot in table["tpot_ns"]],
        link=table["hardware.h2d_pinned"],
    )
    return "TPOT in ms by link bandwidth.\n\n" + markdown(
        wide(shown, ["slots", "policy"], "link", "cell")
    )


def claims(table: pd.DataFrame) -> list[Claim]:
    """The shape only: the paper's numbers behind the figure are not public."""
    lines = []
    for slots, part in table.groupby("slots", sort=False):
        by = part.pivot_table("tpot_ns", "hardware.h2d_pinned", "policy", sort=False)
        saved = 1 - by["oled"] / by["inter_iteration"]
        lines.append(
            Claim(
                f"TPOT saved by OLED on the inter-iteration cache, {slots} slots",
                "-",
                f"{percent(saved.iloc[0])} at {saved.index[0]}, "
                f"{percent(saved.iloc[-1])} at {saved.index[-1]}",
                UNKNOWN,
                "Coop computes misses on the CPU while copies are slow",
            )
        )
        best = by.idxmin(axis=1)
        lines.append(
            Claim(
                f"fastest of the six from slowest to fastest link, {slots} slots",
                "-",
                ", ".join(dict.fromkeys(best)),
                UNKNOWN,
                "on slow links a static cache that never copies is hard to beat",
            )
        )
    return lines
