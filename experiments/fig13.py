"""All systems: two shapes, two workloads, two machines and their ends, two runtimes, two sizes.

A winner that changes between the fast and the slow end of the profile is *undecided*.
"""

from __future__ import annotations

import pandas as pd

from oled._experiments import common
from oled._plots.fig13 import draw
from oled.studies import (
    NOT,
    REPRODUCED,
    UNDECIDED,
    Claim,
    Run,
    judge_range,
    markdown,
    pick,
    wide,
)

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 13: all systems"
WORKLOADS = {"gsm8k": 4, "humaneval": 2}
"""Requests of each: with router scores a trace is large, and gpqa's would take gigabytes."""
OTHER = {"llada2_mini": "rtx4090_desktop", "llada2_flash": "h200"}
POLICIES = [*common.SYSTEMS, "inter_iteration", "oled", "oled_fill"]
KEY = ["trace.geometry", "trace.workload", "hardware", "runtime", "slots"]


def rows(run: Run) -> pd.DataFrame:
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    workloads = {"gsm8k": 2} if run.small else WORKLOADS
    products = []
    for shape in shapes:
        machine, other = shape["hardware"], OTHER[shape["trace.geometry"]]
        points = [
            {"hardware": machine, "runtime": common.RUNTIMES},
            {"hardware": [f"{machine}@fast", f"{machine}@slow"], "runtime": "graph_fused"},
            {"hardware": other, "runtime": "graph_fused"},
        ]
        for workload, requests in workloads.items():
            trace = {"trace.workload": workload, "trace.requests": requests}
            products += [
                shape | trace | point | {"cache.slots": [40, 100], "policy": POLICIES}
                for point in points
            ]
    return run.sweep(products, common.for_systems(run.small))


def speedups(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the prior systems with OLED's TPOT and hit rate beside them."""
    own = table.loc[table["policy"] == "oled", [*KEY, "tpot_ns", "hit_rate"]]
    prior = table[table["policy"].isin(common.SYSTEMS)]
    both = prior.merge(own, on=KEY, suffixes=("", "_oled"))
    return both.assign(
        speedup=both["tpot_ns"] / both["tpot_ns_oled"],
        utilisation=both["hit_rate_oled"] / both["hit_rate"],
    )


def winners(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest on the main machines, or *undecided* where an end of the profile disagrees."""
    graph = table[(table["runtime"] == "graph_fused") & (table["policy"] != "oled_fill")]
    machine = graph["hardware"].str.partition("@")[0]
    graph = graph[machine.isin([common.MINI["hardware"], common.FLASH["hardware"]])]
    found = []
    for place, part in graph.groupby(["trace.geometry", "trace.workload", "slots"], sort=False):
        fastest = part.loc[part.groupby("hardware")["tpot_ns"].idxmin()]
        names = list(dict.fromkeys(fastest["policy"]))
        word = names[0] if len(names) == 1 else f"{UNDECIDED}: {', '.join(names)}"
        found.append((*place, word))
    return pd.DataFrame(found, columns=["shape", "workload", "slots", "fastest"])


def summary(table: pd.DataFrame) -> str:
    table = table[~table["hardware"].str.contains("@")]
    shown = table.assign(
        place=table["trace.workload"] + ", " + table["slots"],
        cell=[
            f"{tpot / 1e6:.1f} ({low / 1e6:.1f} to {high / 1e6:.1f}), {hit:.2f}"
            for tpot, low, high, hit in table[
                ["tpot_ns", "tpot_ns_low", "tpot_ns_high", "hit_rate"]
            ].to_numpy()
        ],
    )
    parts = ["TPOT in ms (95 % over requests), hit rate; by workload and slots of a layer."]
    for place, part in shown.groupby(["trace.geometry", "hardware", "runtime"], sort=False):
        parts += [f"### {', '.join(place)}", markdown(wide(part, ["policy"], "place", "cell"))]
    return "\n\n".join(parts)


def claims(table: pd.DataFrame) -> list[Claim]:
    both = speedups(table[~table["hardware"].str.contains("@")])
    lines = []
    for runtime, part in both.groupby("runtime", sort=False):
        named = pick(part, policy=common.PAPERS)
        for word, rows_of in (("all prior systems", part), ("the paper's baselines", named)):
            speed = float(rows_of["speedup"].min()), float(rows_of["speedup"].max())
            hits = float(rows_of["utilisation"].min()), float(rows_of["utilisation"].max())
            lines += [
                Claim(
                    f"speed-up of OLED over {word}, {runtime}",
                    "1.23 to 7.93",
                    f"{speed[0]:.2f} to {speed[1]:.2f}",
                    judge_range((1.23, 7.93), speed),
                    "HybriMoE splits work as Coop does; a loop over experts favours the CPU",
                ),
                Claim(
                    f"utilisation (read as hit rate) of OLED over {word}, {runtime}",
                    "1.44 to 4.23",
                    f"{hits[0]:.2f} to {hits[1]:.2f}",
                    judge_range((1.44, 4.23), hits),
                    "experts that the CPU computes are misses: Coop lowers hits and TPOT",
                ),
            ]
    lines += [
        Claim(
            f"fastest, prior or OLED, {row.shape}, {row.workload}, {row.slots} slots, graph_fused",
            "oled",
            str(row.fastest),
            _verdict(str(row.fastest)),
        )
        for row in winners(table).itertuples(index=False)
    ]
    return lines


def _verdict(fastest: str) -> str:
    if fastest.startswith(UNDECIDED):
        return UNDECIDED
    return REPRODUCED if fastest == "oled" else NOT
