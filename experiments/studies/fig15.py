"""Ablation; retention and allocation by capacity; reuse-aware against load-only dispatch.

Three things decide the ablation, so they are varied and nothing else: how different the layers are
(process even or uneven), what the baseline is (naive or atomic LRU), and what a CPU expert and the
runtime cost (tuned or framework kernel, graph or expert loop). The bundled model's recording stands
beside, with the bytes and times of LLaDA2.0-mini.
"""

from __future__ import annotations

import pandas as pd

from oled.bundled.plots.fig15 import draw
from oled.bundled.studies import common
from oled.studies.reproduce import Claim, Run, gain, judge, markdown, percent, pick, wide

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 15: what each part of OLED is worth"
SLOTS = [40, 60, 80, 100]
COSTS = [
    {"cost.cpu_kernel": "tuned", "runtime": "graph_fused"},
    {"cost.cpu_kernel": "torch", "runtime": "graph_fused"},
    {"cost.cpu_kernel": "torch", "runtime": "expert_loop"},
]
CAPACITIES = [16, 32, 48, 64, 96, 128]
RETENTIONS = ["lru", "lfu", "lrfu", "inter_iteration", "state_gate", "oled_priority", "oracle"]
ALLOCATIONS = ["oled_priority", "oled_layeradapt", "oled_marginal"]
DISPATCH = "policy.dispatch._target_"
LOAD_ONLY = "oled.policies.dispatch.makespan.MakespanGreedy"
RECORDED = "of the bundled model"
PAPER = {"oled_priority": 0.2056, "oled_layeradapt": 0.0909, "oled": 0.0914}
BEFORE = {"inter_iteration": "naive_lru"} | dict(
    zip(common.ABLATION[2:], common.ABLATION[1:], strict=False)
)


def rows(run: Run) -> pd.DataFrame:
    processes = {"trace.process": ["even", "uneven"]}
    slots = [40, 100] if run.small else SLOTS
    capacities = [40, 100] if run.small else CAPACITIES
    ablation = [
        processes | costs | {"policy": common.ABLATION, "cache.slots": slots} for costs in COSTS
    ]
    usual = COSTS[0]
    others = [
        processes | usual | {"policy": RETENTIONS, "cache.slots": capacities},
        processes | usual | {"policy": ALLOCATIONS, "cache.slots": capacities},
        processes | usual | {DISPATCH: LOAD_ONLY, "policy": "oled", "cache.slots": slots},
    ]
    base = common.synthetic(run.small) | common.MINI
    recorded = {  # of 128 experts: the same shares
        "trace": "demo",
        "cost.geometry": "llada2_mini",
        "hardware": common.MINI["hardware"],
        "policy": common.ABLATION,
        "cache.slots": [number // 2 for number in slots],
    }
    points = [base | product for product in (*ablation, *others)]
    return run.sweep([*points, *(recorded | costs for costs in COSTS)])


def ablation(table: pd.DataFrame) -> pd.DataFrame:
    """Keep rows of the ablation, with words for their layers and costs."""
    table = table.assign(layers=table["trace.process"].fillna(RECORDED))
    slots = table.loc[table["policy"] == "naive_lru", "slots"].unique().tolist()
    own = pick(table[table[DISPATCH].isna()], policy=common.ABLATION, slots=slots)
    return own.assign(costs=own["cpu_kernel"] + " CPU, " + own["runtime"])


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean share of TPOT saved over the capacities, by process, costs and step."""
    found = []
    for (process, costs), part in ablation(table).groupby(["layers", "costs"], sort=False):
        by = part.pivot_table("tpot_ns", "slots", "policy", sort=False)
        for policy, before in BEFORE.items():
            found.append((process, costs, policy, before, gain(by[before], by[policy])))
        naive = gain(by["naive_lru"], by["oled_priority"])
        found.append((process, costs, "oled_priority", "naive_lru", naive))
    return pd.DataFrame(found, columns=["process", "costs", "policy", "before", "gain"])


def retentions(table: pd.DataFrame) -> pd.DataFrame:
    """Return the hit rate of every retention rule by capacity.

    Below it stand, in points, the distance to Belady's and the spread among the rules.
    """
    own = pick(_usual(table), policy=RETENTIONS).drop_duplicates(["layers", "policy", "slots"])
    by = own.pivot_table("hit_rate", ["layers", "policy"], "slots", sort=False)
    by = by[sorted(by, key=int)].dropna(axis=1)
    lines = []
    for layers, part in by.groupby(level="layers", sort=False):
        rates = part.droplevel("layers")
        lines += [(layers, policy, *row.map("{:.3f}".format)) for policy, row in rates.iterrows()]
        rules = rates.drop("oracle")
        below = 100 * (rates.loc["oracle"] - rules.min())
        spread = 100 * (rules.max() - rules.min())
        for what, row in (("points below the oracle", below), ("points among the rules", spread)):
            lines.append((layers, what, *row.map("{:.1f}".format)))
    return pd.DataFrame(lines, columns=["layers", "policy", *by.columns])


def allocations(table: pd.DataFrame) -> pd.DataFrame:
    """Return share of TPOT that an allocation saves over uniform slots, by capacity."""
    own = pick(_usual(table), policy=ALLOCATIONS).drop_duplicates(["layers", "policy", "slots"])
    by = own.pivot_table("tpot_ns", ["layers", "policy"], "slots", sort=False)
    by = by[sorted(by, key=int)].dropna(axis=1)
    lines = []
    for (layers, policy), row in by.iterrows():
        if policy != ALLOCATIONS[0]:
            saved = 1 - row / by.loc[(layers, ALLOCATIONS[0])]
            lines.append((layers, policy, *saved.map(percent)))
    return pd.DataFrame(lines, columns=["layers", "policy", *by.columns])


def _usual(table: pd.DataFrame) -> pd.DataFrame:
    """Keep the made-up layers at the first cost point."""
    own = pick(table, cpu_kernel=COSTS[0]["cost.cpu_kernel"], runtime=COSTS[0]["runtime"])
    own = own[own[DISPATCH].isna() & own["trace.process"].notna()]
    return own.assign(layers=own["trace.process"])


def summary(table: pd.DataFrame) -> str:
    shown = ablation(table).assign(
        cell=lambda t: [
            f"{a / 1e6:.2f} ({b:.3f})" for a, b in t[["tpot_ns", "hit_rate"]].to_numpy()
        ]
    )
    steps = gains(table).assign(
        cell=lambda t: [percent(x) for x in t["gain"]],
        step=lambda t: t["policy"] + " over " + t["before"],
    )
    load = table[table[DISPATCH].notna()]
    own = table[table[DISPATCH].isna() & table["trace.process"].notna()]
    own = pick(own, policy="oled", cpu_kernel="tuned")
    pairs = load.merge(own, on=["trace.process", "slots", "runtime"], suffixes=("_load", ""))
    dispatch = pd.DataFrame(
        {
            "layers": pairs["trace.process"],
            "slots": pairs["slots"],
            "reuse-aware": pairs["effective_transfer_ratio"].map("{:.3f}".format),
            "load-only": pairs["effective_transfer_ratio_load"].map("{:.3f}".format),
            "TPOT ms": (pairs["tpot_ns"] / 1e6).map("{:.2f}".format),
            "TPOT ms, load-only": (pairs["tpot_ns_load"] / 1e6).map("{:.2f}".format),
        }
    )
    return "\n\n".join(
        [
            "TPOT in ms (hit rate).",
            *(
                markdown(wide(part, ["layers", "costs", "policy"], "slots", "cell"))
                for _, part in shown.groupby(shown["layers"] == RECORDED)
            ),
            "TPOT saved by each step, mean over the capacities.",
            markdown(wide(steps, ["process", "costs"], "step", "cell")),
            "Below, a step is judged at the costs whose figure is nearest to the paper's.",
            "Hit rate of retention rules, every miss copied, uniform slots.",
            markdown(retentions(table)),
            "TPOT that an allocation saves over uniform slots (both with Priority).",
            markdown(allocations(table)),
            "Share of the transferred experts that are used again before they leave.",
            markdown(dispatch),
        ]
    )


WHY = {
    "oled_priority": "against an atomic LRU a score only matters where the active set exceeds the "
    "slots; the paper's figure comes out against a naive LRU only",
    "oled_layeradapt": "decided by how different the layers are, which is not published",
    "oled": "decided by what a CPU expert costs beside a copy, and by the runtime",
}


def claims(table: pd.DataFrame) -> list[Claim]:
    found = gains(table)
    lines = []
    for policy, paper in PAPER.items():
        for process, part in found[found["policy"] == policy].groupby("process", sort=False):
            for before, own in part.groupby("before", sort=False):
                values = own["gain"].to_numpy()
                best = min(values, key=lambda value: abs(value - paper))
                lines.append(
                    Claim(
                        f"{policy} over {before}, layers {process}",
                        percent(paper),
                        f"{percent(values.min())} to {percent(values.max())} by costs",
                        judge(paper, float(best)),
                        WHY[policy],
                    )
                )
    return lines
