"""All systems: three traces' shapes, three workloads, two machines and their ends, two runtimes.

A winner that changes between the fast and the slow end of the profile, or that is not ahead of the
next in 95 % of resampled requests, is *undecided*.
"""

from __future__ import annotations

import pandas as pd

from oled.bundled.plots.fig13 import draw
from oled.bundled.plots.style import shape
from oled.bundled.studies import common
from oled.studies.reproduce import (
    NOT,
    REPRODUCED,
    UNDECIDED,
    UNREAD,
    Claim,
    Run,
    judge_range,
    markdown,
    pick,
    ratio_interval,
    wide,
)

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 13: all systems"
WORKLOADS = {"gsm8k": 16, "humaneval": 16, "gpqa": 8}
"""Requests of each; gpqa's are three times as long."""
SLOTS = [40, 100]
MACHINES = {"llada2_mini": "rtx4090_desktop", "llada2_flash": "h200"}
"""The other machine of each shape."""
POLICIES = [*common.SYSTEMS, "inter_iteration", "oled", "oled_fill"]
KEY = ["shape", "workload", "slots"]
PLACE = [*KEY, "hardware", "runtime"]


def rows(run: Run) -> pd.DataFrame:
    shapes = [common.MINI] if run.small else [common.MINI, common.FLASH]
    workloads = {"gsm8k": 2} if run.small else WORKLOADS
    base = common.for_systems(run.small) | {"cache.slots": SLOTS, "policy": POLICIES}
    products = []
    for one in shapes:
        other = {"hardware": MACHINES[one["trace.geometry"]], "runtime": "graph_fused"}
        for workload, requests in workloads.items():
            trace = {"trace.workload": workload, "trace.requests": requests}
            products += [base | one | trace | point for point in [*_points(one), other]]
    recorded = common.RECORDED | {"cache.slots": common.halves(SLOTS), "policy": POLICIES}
    return run.sweep(products + [recorded | point for point in _points(common.RECORDED)])


def _points(machine: dict[str, str]) -> list[dict[str, object]]:
    """Return a machine under both runtimes, and its ends under one."""
    name = machine["hardware"]
    return [
        {"hardware": name, "runtime": common.RUNTIMES},
        {"hardware": [f"{name}@fast", f"{name}@slow"], "runtime": "graph_fused"},
    ]


def named(table: pd.DataFrame) -> pd.DataFrame:
    """Add the shape and the workload of each row in words."""
    return table.assign(
        shape=shape(table),
        workload=table["trace.workload"].fillna("its own prompts"),
        machine=table["hardware"].str.partition("@")[0],
        end=table["hardware"].str.partition("@")[2],
    )


def speedups(table: pd.DataFrame) -> pd.DataFrame:
    """Add OLED's speed-up over the other systems, its interval, and the ratio of hit rates."""
    own = table.loc[table["policy"] == "oled"]
    own = own[[*PLACE, "tpot_ns", "hit_rate", "requests.decoding_ns"]]
    both = table[table["policy"] != "oled"].merge(own, on=PLACE, suffixes=("", "_oled"))
    pairs = zip(both["requests.decoding_ns"], both["requests.decoding_ns_oled"], strict=True)
    ends = [ratio_interval(over, under) for over, under in pairs]
    return both.assign(
        speedup=both["tpot_ns"] / both["tpot_ns_oled"],
        low=[low for low, _ in ends],
        high=[high for _, high in ends],
        utilisation=both["hit_rate_oled"] / both["hit_rate"],
    )


def usual(table: pd.DataFrame) -> pd.DataFrame:
    """Keep captured graphs on the main machine of each shape, its ends included."""
    mains = [one["hardware"] for one in (common.MINI, common.FLASH)]
    return pick(table, runtime="graph_fused", machine=mains)


def winners(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest, prior or OLED, where machine's ends and requests agree."""
    rows_of = usual(table[table["policy"] != "oled_fill"])
    found = []
    for place, part in rows_of.groupby(KEY, sort=False):
        first, second = part[part["end"] == ""].sort_values("tpot_ns").iloc[:2].to_dict("records")
        low, _ = ratio_interval(second["requests.decoding_ns"], first["requests.decoding_ns"])
        fastest = part.loc[part.groupby("hardware", sort=False)["tpot_ns"].idxmin(), "policy"]
        names = list(dict.fromkeys([first["policy"], *fastest]))
        if len(names) > 1:
            word = f"{UNDECIDED} by the machine's ends: {', '.join(names)}"
        elif low <= 1:
            word = f"{UNDECIDED} by requests: {first['policy']}, {second['policy']}"
        else:
            word = first["policy"]
        found.append((*place, word))
    return pd.DataFrame(found, columns=["shape", "workload", "slots", "fastest"])


def summary(table: pd.DataFrame) -> str:
    table = named(table)
    shown = table[table["end"] == ""]
    cells = shown[["tpot_ns", "tpot_ns_low", "tpot_ns_high", "hit_rate"]].to_numpy()
    shown = shown.assign(
        place=shown["workload"] + ", " + shown["slots"],
        cell=[
            f"{tpot / 1e6:.1f} ({low / 1e6:.1f} to {high / 1e6:.1f}), {hit:.2f}"
            for tpot, low, high, hit in cells
        ],
    )
    parts = ["TPOT in ms (95 % over requests), hit rate; by workload and slots of a layer."]
    for place, part in shown.groupby(["shape", "machine", "runtime"], sort=False):
        parts += [f"### {', '.join(place)}", markdown(wide(part, ["policy"], "place", "cell"))]
    parts += [
        "### OLED's speed-up",
        "TPOT over OLED's, `graph_fused`: (95 % over requests, in pairs) [from the fast to the "
        "slow end of the machine's profile].",
    ]
    for place, part in _speedup_cells(usual(table)).groupby(["shape", "machine"], sort=False):
        parts += [f"#### {', '.join(place)}", markdown(wide(part, ["policy"], "place", "cell"))]
    return "\n\n".join(parts)


def _speedup_cells(table: pd.DataFrame) -> pd.DataFrame:
    found = speedups(table)
    ends = found.pivot_table("speedup", [*KEY, "policy"], "end", sort=False)
    main = found[found["end"] == ""]
    cells = []
    for row in main.to_dict("records"):
        fast, slow = ends.loc[(*(row[key] for key in KEY), row["policy"]), ["fast", "slow"]]
        interval = f"({row['low']:.2f} to {row['high']:.2f})"
        cells.append(f"{row['speedup']:.2f} {interval} [{fast:.2f} to {slow:.2f}]")
    return main.assign(place=main["workload"] + ", " + main["slots"], cell=cells)


def claims(table: pd.DataFrame) -> list[Claim]:
    table = named(table)
    both = speedups(table[table["end"] == ""])
    lines = []
    for runtime, part in both.groupby("runtime", sort=False):
        for word, policies in (
            ("all prior systems", common.SYSTEMS),
            ("the paper's baselines", common.PAPERS),
        ):
            lines += _ranges(pick(part, policy=policies), f"{word}, {runtime}")
        named_ones = pick(part, policy=common.PAPERS)["speedup"]
        lines.append(
            Claim(
                f"speed-up of OLED over the paper's baselines, mean and greatest, {runtime}",
                "1.95, up to 3.73",
                f"{named_ones.mean():.2f}, up to {named_ones.max():.2f}",
                UNREAD,
                "read as TPOT; the paper's may be of TTFT (fig14), of one model or one baseline",
            )
        )
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


def _ranges(part: pd.DataFrame, whom: str) -> list[Claim]:
    speed = float(part["speedup"].min()), float(part["speedup"].max())
    hits = float(part["utilisation"].min()), float(part["utilisation"].max())
    return [
        Claim(
            f"speed-up of OLED over {whom}",
            "1.23 to 7.93",
            f"{speed[0]:.2f} to {speed[1]:.2f}",
            judge_range((1.23, 7.93), speed),
            "HybriMoE splits work as Coop does; a loop over experts favours the CPU",
        ),
        Claim(
            f"utilisation (read as hit rate) of OLED over {whom}",
            "1.44 to 4.23",
            f"{hits[0]:.2f} to {hits[1]:.2f}",
            judge_range((1.44, 4.23), hits),
            "experts that the CPU computes are misses: Coop lowers hits and TPOT",
        ),
    ]


def _verdict(fastest: str) -> str:
    if fastest.startswith(UNDECIDED):
        return UNDECIDED
    return REPRODUCED if fastest == "oled" else NOT
