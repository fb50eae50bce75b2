"""Prefill: time to the first token and hit rate, at 40 slots a layer."""

from __future__ import annotations

import pandas as pd

from oled.bundled.plots.fig14 import draw
from oled.bundled.studies import common
from oled.bundled.studies.fig13 import KEY, WORKLOADS, named
from oled.studies.reproduce import UNKNOWN, UNREAD, Claim, Run, markdown, pick, ratio_interval, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 14: prefill"
POLICIES = [*common.SYSTEMS, "inter_iteration", "oled"]


def rows(run: Run) -> pd.DataFrame:
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    workloads = {"gsm8k": 2} if run.small else WORKLOADS
    base = common.for_systems(run.small) | {"policy": POLICIES, "cache.slots": 40}
    products = [
        base | one | {"trace.workload": workload, "trace.requests": requests}
        for one in shapes
        for workload, requests in workloads.items()
    ]
    return run.sweep([*products, common.RECORDED | {"policy": POLICIES, "cache.slots": 20}])


def summary(table: pd.DataFrame) -> str:
    shown = named(table)
    times = zip(shown["prefill_ns"], shown["phases.prefill.hit_rate"], strict=True)
    shown = shown.assign(
        place=shown["shape"] + ", " + shown["workload"],
        cell=[f"{ttft / 1e6:.0f}, {hit:.2f}" for ttft, hit in times],
    )
    return (
        "TTFT in ms, hit rate of prefill; the cache starts as each system begins.\n\n"
        + markdown(wide(shown, ["policy"], "place", "cell"))
    )


def claims(table: pd.DataFrame) -> list[Claim]:
    table = named(table)
    own = table.loc[table["policy"] == "oled", [*KEY, "prefill_ns", "requests.prefill_ns"]]
    both = pick(table, policy=common.SYSTEMS).merge(own, on=KEY, suffixes=("", "_oled"))
    both = both.assign(speedup=both["prefill_ns"] / both["prefill_ns_oled"])
    named_ones = pick(both, policy=common.PAPERS)["speedup"]
    lines = [
        Claim(
            "speed-up of OLED over the paper's baselines, mean and greatest",
            "1.95, up to 3.73",
            f"{named_ones.mean():.2f}, up to {named_ones.max():.2f}",
            UNREAD,
            "read as TTFT; the paper's may be of TPOT (fig13), of one model or one baseline",
        )
    ]
    for place, part in both.groupby(["shape", "workload"], sort=False):
        best = part.loc[part["speedup"].idxmin()]
        low, high = ratio_interval(best["requests.prefill_ns"], best["requests.prefill_ns_oled"])
        lines.append(
            Claim(
                f"TTFT of the best prior system over OLED's, {', '.join(place)}",
                "-",
                f"{best['speedup']:.2f} ({low:.2f} to {high:.2f}; {best['policy']})",
                UNKNOWN,
                "a prompt activates most experts: only link and CPU count",
            )
        )
    return lines
