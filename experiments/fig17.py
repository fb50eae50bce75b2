"""GPU memory of the experts against TPOT, up to full residency: mini and flash."""

from __future__ import annotations

import pandas as pd

from oled._experiments import common
from oled._plots.fig17 import draw
from oled.studies import Claim, Run, judge, markdown, percent, pick, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 17: GPU memory against TPOT"
SLOTS = [20, 40, 60, 80, 100, 128, 160, 200, 256]
POLICIES = ["inter_iteration", "ktransformers", "oled", "oled_fill"]
PAPER = {"llada2_mini": 0.32, "llada2_flash": 0.23}


def rows(run: Run) -> pd.DataFrame:
    axes = {
        "policy": POLICIES,
        "runtime": common.RUNTIMES,
        "cache.slots": [40, 100] if run.small else SLOTS,
    }
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    return run.sweep([shape | axes for shape in shapes], common.synthetic(run.small, 8))


def summary(table: pd.DataFrame) -> str:
    shown = table.assign(
        memory=[f"{size / 2**30:.1f} GiB" for size in table["gpu_bytes_total"]],
        cell=[f"{tpot / 1e6:.2f}" for tpot in table["tpot_ns"]],
    )
    parts = ["TPOT in ms by slots of a layer."]
    for shape, part in shown.groupby("trace.geometry", sort=False):
        sizes = dict(zip(part["slots"], part["memory"], strict=True))
        words = ", ".join(f"{slots} slots are {size}" for slots, size in sizes.items())
        parts += [
            f"{shape}: {words}.",
            markdown(wide(part, ["runtime", "policy"], "slots", "cell")),
        ]
    return "\n\n".join(parts)


def claims(table: pd.DataFrame) -> list[Claim]:
    """Full residency is read as the same runtime with every expert a hit."""
    lines = []
    for (shape, runtime), part in table.groupby(["trace.geometry", "runtime"], sort=False):
        own = pick(part, policy="oled", slots="100").iloc[0]
        ours = float(own["tpot_ns"] / own["ideal_tpot_ns"] - 1)
        paper = PAPER[shape]
        lines.append(
            Claim(
                f"OLED at 100 slots over full residency, {shape}, {runtime}",
                percent(paper),
                percent(ours),
                judge(paper, ours),
                "graph: copies stand beside a short forward; loop: the CPU relieves the GPU's loop",
            )
        )
    return lines
