"""Prefill: time to the first token and hit rate, at 40 slots a layer."""

from __future__ import annotations

import pandas as pd

from oled._experiments import common
from oled._experiments.fig13 import WORKLOADS
from oled._plots.fig14 import draw
from oled.studies import UNKNOWN, Claim, Run, markdown, pick, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 14: prefill"


def rows(run: Run) -> pd.DataFrame:
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    workloads = {"gsm8k": 2} if run.small else WORKLOADS
    products = [
        shape | {"trace.workload": workload, "trace.requests": requests}
        for shape in shapes
        for workload, requests in workloads.items()
    ]
    axes = {"policy": [*common.SYSTEMS, "inter_iteration", "oled"], "cache.slots": 40}
    return run.sweep([product | axes for product in products], common.for_systems(run.small))


def summary(table: pd.DataFrame) -> str:
    shown = table.assign(
        place=table["trace.geometry"] + ", " + table["trace.workload"],
        cell=[
            f"{ttft / 1e6:.0f}, {hit:.2f}"
            for ttft, hit in table[["ttft_ns", "phases.prefill.hit_rate"]].to_numpy()
        ],
    )
    return (
        "TTFT in ms, hit rate of prefill; the cache starts as each system begins.\n\n"
        + markdown(wide(shown, ["policy"], "place", "cell"))
    )


def claims(table: pd.DataFrame) -> list[Claim]:
    own = pick(table, policy="oled")
    lines = []
    for row in own.itertuples(index=False):
        part = pick(table, trace=row.trace)
        prior = part[part["policy"].isin(common.SYSTEMS)]
        best = prior.loc[prior["ttft_ns"].idxmin()]
        ratio = best["ttft_ns"] / row.ttft_ns
        lines.append(
            Claim(
                f"TTFT of the best prior system over OLED's, {row.trace.partition('-r')[0]}",
                "-",
                f"{ratio:.2f} ({best['policy']})",
                UNKNOWN,
                "a prompt activates most experts: only link and CPU count",
            )
        )
    return lines
