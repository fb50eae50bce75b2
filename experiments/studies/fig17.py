"""GPU memory of the experts against TPOT, up to full residency: mini, flash and the recording."""

from __future__ import annotations

import pandas as pd

from oled.bundled.plots.fig17 import draw
from oled.bundled.plots.style import RECORDED, shape
from oled.bundled.studies import common
from oled.studies.reproduce import UNKNOWN, Claim, Run, judge, markdown, percent, pick, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 17: GPU memory against TPOT"
SLOTS = [20, 40, 60, 80, 100, 128, 160, 200, 256]
POLICIES = ["inter_iteration", "ktransformers", "oled", "oled_fill"]
PAPER = {"llada2_mini": 0.32, "llada2_flash": 0.23}


def rows(run: Run) -> pd.DataFrame:
    axes = {"policy": POLICIES, "runtime": common.RUNTIMES}
    slots = [40, 100] if run.small else SLOTS
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    base = common.synthetic(run.small) | axes | {"cache.slots": slots}
    recorded = common.RECORDED | axes | {"cache.slots": common.halves(slots)}
    return run.sweep([*(base | one for one in shapes), recorded])


def summary(table: pd.DataFrame) -> str:
    shown = table.assign(
        shape=shape(table),
        memory=[f"{size / 2**30:.1f} GiB" for size in table["gpu_bytes_total"]],
        cell=[f"{tpot / 1e6:.2f}" for tpot in table["tpot_ns"]],
    )
    parts = ["TPOT in ms by slots of a layer."]
    for name, part in shown.groupby("shape", sort=False):
        sizes = dict(zip(part["slots"], part["memory"], strict=True))
        words = ", ".join(f"{slots} slots are {size}" for slots, size in sizes.items())
        parts += [
            f"{name}: {words}.",
            markdown(wide(part, ["runtime", "policy"], "slots", "cell")),
        ]
    return "\n\n".join(parts)


def claims(table: pd.DataFrame) -> list[Claim]:
    """Compare with the paper; full residency is the same runtime with every expert a hit."""
    table = table.assign(shape=shape(table))
    lines = []
    for (name, runtime), part in table.groupby(["shape", "runtime"], sort=False):
        slots = "50" if name == RECORDED else "100"
        own = pick(part, policy="oled", slots=slots).iloc[0]
        ours = float(own["tpot_ns"] / own["ideal_tpot_ns"] - 1)
        paper = PAPER.get(name)
        lines.append(
            Claim(
                f"OLED at {slots} slots over full residency, {name}, {runtime}",
                "-" if paper is None else percent(paper),
                percent(ours),
                UNKNOWN if paper is None else judge(paper, ours),
                "graph: copies stand beside a short forward; loop: the CPU relieves the GPU's loop",
            )
        )
    return lines
