"""Block length and batch size by cache size: active experts, TPOT, and the best block length.

The process is fitted to the published union sizes at blocks of 8 to 32; 4 and 64 are outside of it.
The bundled model is recorded at its own block lengths; it opens two tokens a forward at each.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from oled.bundled.plots.fig16 import active, block_length, by_batch, by_block, draw
from oled.bundled.plots.style import shape
from oled.bundled.studies import common
from oled.bundled.studies.recorded import recorded
from oled.studies.reproduce import UNKNOWN, Claim, Run, judge, markdown, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 16: block length and batch size"
BLOCKS = [4, 8, 16, 24, 32, 64]
RECORDED_BLOCKS = [8, 16, 32]
BATCHES = [1, 2, 4, 8, 16]
SLOTS = [40, 100, 160]
POLICIES = ["inter_iteration", "oled"]
UNION = {8: 31.5, 16: 48.6, 24: 60.7, 32: 70.0}
"""Distinct experts a layer and forward of LLaDA2.0-mini (dMoE, arXiv 2605.30876, MATH500)."""


def rows(run: Run) -> pd.DataFrame:
    if run.small:
        return run.sweep(_products([8, 16], [1, 2], [40, 100], run))
    products = _products(BLOCKS, BATCHES, SLOTS, run)
    own = {"policy": POLICIES, "cache.slots": common.halves(SLOTS)}
    for block in RECORDED_BLOCKS:
        products.append(common.RECORDED | own | {"trace": recorded(block)})
    return run.sweep([*products, common.RECORDED | own | {"workload.batch_size": [1, 2, 4, 8]}])


def _products(
    blocks: list[int], batches: list[int], slots: list[int], run: Run
) -> list[dict[str, Any]]:
    base = common.synthetic(run.small) | common.MINI | {"policy": POLICIES, "cache.slots": slots}
    return [
        base | {"trace.block_length": blocks},
        base | {"trace.block_length": 16, "workload.batch_size": batches},
    ]


def summary(table: pd.DataFrame) -> str:
    table = table.assign(
        shape=shape(table),
        cell=(table["tpot_ns"] / 1e6).map("{:.2f}".format),
        union=active(table).map("{:.1f}".format),
        what="active",
    )
    parts = []
    for name, part in table.groupby("shape", sort=False):
        own = part.assign(block=block_length(part))
        single, batched = by_block(own), by_batch(own)
        parts += [
            f"### {name}",
            "Active experts a layer and denoising forward, and TPOT in ms, by block length.",
            markdown(wide(single, ["what"], "block", "union")),
            markdown(wide(single, ["slots", "policy"], "block", "cell")),
            "The same by requests in lockstep, block 16 (TPOT of one request's tokens).",
            markdown(wide(batched, ["what"], "batch_size", "union")),
            markdown(wide(batched, ["slots", "policy"], "batch_size", "cell")),
        ]
    return "\n\n".join(parts)


def claims(table: pd.DataFrame) -> list[Claim]:
    table = table.assign(shape=shape(table), union=active(table), block=block_length(table))
    single = by_block(table)
    lines = []
    for block, paper in UNION.items():
        own = single.loc[(single["block"] == block) & single["trace.geometry"].notna(), "union"]
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
    for (name, slots, policy), part in single.groupby(["shape", "slots", "policy"], sort=False):
        best = part.sort_values("tpot_ns")["block"].iloc[0]
        lines.append(
            Claim(
                f"block length that minimises TPOT, {name}, {policy}, {slots} slots",
                "-",
                str(best),
                UNKNOWN,
                "tokens a forward grow more slowly than the active set",
            )
        )
    return lines
