"""Block length and batch size by cache size: active experts, TPOT, and the best block length.

The process is fitted to the published union sizes at blocks of 8 to 32; 4 and 64 are outside of it.
"""

from __future__ import annotations

import pandas as pd

from oled._experiments import common
from oled._plots.fig16 import active, draw
from oled.studies import UNKNOWN, Claim, Run, judge, markdown, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 16: block length and batch size"
BLOCKS = [4, 8, 16, 24, 32, 64]
BATCHES = [1, 2, 4, 8, 16]
SLOTS = [40, 100, 160]
POLICIES = ["inter_iteration", "oled"]
UNION = {8: 31.5, 16: 48.6, 24: 60.7, 32: 70.0}
"""Distinct experts a layer and forward of LLaDA2.0-mini (dMoE, arXiv 2605.30876, MATH500)."""


def rows(run: Run) -> pd.DataFrame:
    small = run.small
    usual = {"policy": POLICIES, "cache.slots": [40, 100] if small else SLOTS}
    blocks = usual | {"trace.block_length": [8, 16] if small else BLOCKS}
    batches = usual | {
        "trace.block_length": 16,
        "workload.batch_size": [1, 2] if small else BATCHES,
    }
    return run.sweep([blocks, batches], common.synthetic(small) | common.MINI)


def summary(table: pd.DataFrame) -> str:
    shown = table.assign(
        block=table["trace.block_length"].astype(int),
        cell=[f"{tpot / 1e6:.2f}" for tpot in table["tpot_ns"]],
        union=[f"{value:.1f}" for value in active(table)],
    )
    single = shown[shown["batch_size"] == 1]
    batched = shown[shown["block"] == 16]
    return "\n\n".join(
        [
            "Active experts a layer and denoising forward, and TPOT in ms, by block length.",
            markdown(wide(single.assign(what="active"), ["what"], "block", "union")),
            markdown(wide(single, ["slots", "policy"], "block", "cell")),
            "The same by requests in lockstep, block 16 (TPOT of one request's tokens).",
            markdown(wide(batched.assign(what="active"), ["what"], "batch_size", "union")),
            markdown(wide(batched, ["slots", "policy"], "batch_size", "cell")),
        ]
    )


def claims(table: pd.DataFrame) -> list[Claim]:
    single = table[table["batch_size"] == 1]
    single = single.assign(union=active(single), block=single["trace.block_length"].astype(int))
    lines = []
    for block, paper in UNION.items():
        own = single.loc[single["block"] == block, "union"]
        if len(own):
            ours = float(own.iloc[0])
            lines.append(
                Claim(
                    f"active experts at block {block} (dMoE)",
                    f"{paper}",
                    f"{ours:.1f}",
                    judge(paper, ours),
                    "what the process was fitted to",
                )
            )
    for (slots, policy), part in single.groupby(["slots", "policy"], sort=False):
        best = part.sort_values("tpot_ns")["block"].iloc[0]
        lines.append(
            Claim(
                f"block length that minimises TPOT, {policy}, {slots} slots",
                "-",
                str(best),
                UNKNOWN,
                "tokens a forward grow more slowly than the active set",
            )
        )
    return lines
