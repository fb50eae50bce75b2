"""The systems of other papers on one clock: time, bytes, hits, and quality where it changes.

Two traces. The bundled model on held-out problems, recorded here with router scores and with what
its trained predictors say, at LLaDA2.0-mini's bytes and times; what changes routes or experts runs
in the model itself (*live*), which has its own text and its own trace, and rules are also replayed
on the unchanged trace. And the made-up trace of LLaDA2.0-mini's size, where predictions and paths
are made up too, and where there is no text. Several GPUs are a block of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from oled.altered.split import PathPlan, write_split_trace
from oled.bundled.plots.systems import draw
from oled.bundled.studies import common
from oled.bundled.studies.recorded import HOME
from oled.bundled.studies.synthetic_heads import with_heads
from oled.bundled.studies.systems_live import RULES, SMALL, Live, Size, run_live
from oled.bundled.studies.systems_published import Side, claims_of
from oled.policies.files import read_policy
from oled.results import table as results
from oled.studies.reproduce import Claim, Run, markdown
from oled.trace import load
from oled.trace.synthetic import Synthetic

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "The other systems on one clock"
RECORDED, SYNTHETIC = "bundled model", "synthetic"
SLOTS = [40, 100]  # of 256; of 128 half as many
PLAIN = ["lru", "inter_iteration", "ktransformers", "oled", "oracle", "saem", "saem_oracle"]
FORETOLD = ["temporal_router", "spatio_temporal_router", "spice", "spice_exact"]
PARALLEL = ["static_ep", "eplb", "epic"]
MACHINES = {"nvlink_8": "h100_sxm", "nodes_2x4": "h100_sxm", "pcie_gen5_4": "rtx_pro_6000"}
SYSTEMS = [
    *PLAIN,
    *FORETOLD,
    "draftexpert",
    "pcomoe",
    *(name for rule in RULES for name in (rule, f"{rule}, replayed")),
]
REFERENCES = {"bound_relaxed": "lower bound", "all_resident": "all experts resident"}
HALVES = 0.5  # of the made-up expansions are kept: the default of `oled paths`
BATCH = 8  # requests in lockstep on several GPUs


def rows(run: Run) -> pd.DataFrame:
    spec = Synthetic(requests=1 if run.small else BATCH, scores=common.SCORES)
    folder = HOME / ("systems-small" if run.small else "systems")
    slots = SLOTS[:1] if run.small else SLOTS
    halves = common.halves(slots)
    machines = ["nodes_2x4"] if run.small else list(MACHINES)
    live = run_live(SMALL if run.small else Size(), folder, halves)
    made = common.synthetic(False, spec.requests, scores=spec.scores)
    table = run.sweep(
        [
            *_recorded(live, halves),
            *_synthetic(spec, slots, folder),
            *_several(common.RECORDED | {"trace": live.plain}, machines, live.requests),
            *_several(made | {"trace.geometry": spec.geometry}, machines, spec.requests),
        ]
    )
    table = table.assign(side=[_side(trace) for trace in table["trace"]])
    table = table.assign(system=[_system(*pair) for pair in table[["policy", "trace"]].to_numpy()])
    produced = {RECORDED: _produced(Path(live.plain)), SYNTHETIC: _produced(spec.folder())}
    table = table.assign(produced=table["side"].map(produced))
    measured = pd.DataFrame(list(_quality(live, halves)))
    table = table.merge(measured, how="left", on=["system", "side", "slots"])
    order = table["system"].map([*SYSTEMS, *PARALLEL].index)
    table = table.assign(order=order).sort_values(["side", "slots", "topology", "order"])
    return results.write_table(
        table.drop(columns="order").to_dict("records"), run.out / results.TABLE
    )


def _several(base: dict[str, Any], machines: list[str], requests: int) -> list[dict[str, Any]]:
    """Run every placement on every machine, so many requests in lockstep."""
    batch = {"workload.batch_size": min(BATCH, requests), "policy": PARALLEL}
    return [base | batch | {"topology": name, "hardware": MACHINES[name]} for name in machines]


def _produced(trace: Path) -> int:
    """Return the tokens that were produced."""
    return int(load(trace).forwards.produced.sum())


def _quality(live: Live, slots: list[int]) -> Iterator[dict[str, Any]]:
    """Return what was measured of each changed model; mostly the same at every cache size."""
    for number in slots:
        found = {system: altered.quality for system, altered in live.altered.items()}
        for system, quality in (found | {"spice": live.given_up[number]}).items():
            measured = {f"quality.{key}": x for key, x in results.flatten(quality).items()}
            yield {"system": system, "side": RECORDED, "slots": str(number)} | measured


def _recorded(live: Live, slots: list[int]) -> list[dict[str, Any]]:
    base = common.RECORDED | {"calibration": "calibration", "cache.slots": slots}
    closed = dict.fromkeys(RULES, "inter_iteration") | {"pcomoe": "pcomoe"}
    return [
        base | {"trace": live.plain, "policy": [*PLAIN, *FORETOLD, *RULES]},
        base | {"trace": live.drafted, "policy": "draftexpert"},
        *(
            base | {"trace": live.altered[system].trace, "policy": policy}
            for system, policy in closed.items()
        ),
    ]


def _synthetic(spec: Synthetic, slots: list[int], folder: Path) -> list[dict[str, Any]]:
    base = common.synthetic(False, spec.requests, scores=spec.scores) | common.MINI
    made = {"hardware": common.MINI["hardware"], "cache.slots": slots}
    headed = with_heads(spec, folder / "synthetic-heads")
    halves = _made_up_paths(spec, folder / "synthetic-pcomoe")
    return [
        base | {"cache.slots": slots, "policy": [*PLAIN, *RULES]},
        made | {"trace": str(headed), "policy": FORETOLD},
        made | {"trace": str(halves), "policy": "pcomoe"},
    ]


def _made_up_paths(spec: Synthetic, folder: Path) -> Path:
    geometry = load(spec.folder()).geometry
    plan = PathPlan.at_random(geometry.experts_per_layer, HALVES, geometry.top_k)
    return write_split_trace(spec.folder(), folder, plan)


def _side(trace: str) -> str:
    return SYNTHETIC if Path(trace).name.startswith("synthetic") else RECORDED


def _system(policy: str, trace: str) -> str:
    """Run a rule live where the trace is its own; replay it where it is the policy."""
    if policy in RULES:
        return f"{policy}, replayed"
    own = Path(trace).name.removeprefix("tiny-")
    return own if own in RULES else policy


def by_cache(table: pd.DataFrame) -> dict[tuple[str, bool], Side]:
    """Group cached systems by trace and whether the cache is the larger one."""
    cached = table[table["topology"].isna()]
    found = {}
    for side in (RECORDED, SYNTHETIC):
        own = cached[cached["side"] == side]
        for large, slots in enumerate(sorted(own["slots"].unique(), key=int)):
            found[side, bool(large)] = Side(own[own["slots"] == slots].set_index("system"))
    return found


def summary(table: pd.DataFrame) -> str:
    sides = by_cache(table)
    parts = [
        "Left the bundled model on held-out problems (LLaDA2.0-mini's bytes and times), right the "
        "made-up trace of LLaDA2.0-mini's size. MB are copied to the GPU in decoding forwards, a "
        "token; hits are of all active experts, prefill included. Text: what the change costs the "
        "bundled model in held-out loss, with 95 % over the problems, and how much of what it "
        "writes stays the same. On the made-up trace predictions ahead and the paths of PCoMoE are "
        "made up as well, the temporal head is fitted, and there is no text. "
        "References are those of the unchanged routes and experts; what needs fewer may lie below."
    ]
    for large in sorted({large for _, large in sides}):
        ours, made = (sides[side, large].rows for side in (RECORDED, SYNTHETIC))
        parts += [
            f"### One GPU, {ours['slots'].iloc[0]} of 128 and {made['slots'].iloc[0]} of 256 slots "
            "a layer",
            markdown(pd.DataFrame([_line(system, ours, made) for system in SYSTEMS])),
            markdown(pd.DataFrame([_reference(name, ours, made) for name in REFERENCES])),
        ]
    return "\n\n".join(
        [
            *parts,
            "### Several GPUs, every expert on one of them at least",
            "Requests in lockstep; TPOT of one request's tokens. MB a token: experts that moved, "
            "and tokens on their way between GPUs. Nothing is missed and no text changes.",
            markdown(_parallel(table)),
        ]
    )


WITHOUT_MODEL = {"draftexpert": "no draft of a made-up model"}
"""Why a system has no row on the made-up trace; all others could not run live."""


def _line(system: str, ours: pd.DataFrame, made: pd.DataFrame) -> dict[str, str]:
    source = str(ours.loc[system, "provenance.policy_source"])
    rule = system.partition(",")[0]
    return {
        "system": f"{system}, live" if system in (*RULES, "pcomoe") else system,
        "source": read_policy(rule)[0]["source"] if rule in RULES else source,
        **_cells(ours, system, ""),
        "text": _text(ours.loc[system]),
        **_cells(made, system, ", made up"),
    }


def _cells(rows: pd.DataFrame, system: str, suffix: str) -> dict[str, str]:
    heads = [f"{head}{suffix}" for head in ("TPOT ms", "MB a token", "hit rate")]
    if system not in rows.index:
        return dict.fromkeys(heads, WITHOUT_MODEL.get(system, "no model to run live"))
    row = rows.loc[system]
    values = (
        f"{row['tpot_ns'] / 1e6:.2f}",
        f"{row['decode_h2d_bytes_per_token'] / 1e6:.0f}",
        f"{row['hit_rate']:.3f}",
    )
    return dict(zip(heads, values, strict=True))


def _text(row: pd.Series[Any]) -> str:
    words = []
    if pd.notna(row["quality.bits_per_token_more"]):
        more, low, high = (
            row[f"quality.bits_per_token_more{end}"] for end in ("", "_low", "_high")
        )
        same = row["quality.same_tokens"]
        words = [f"{more:+.3f} bits a token ({low:+.3f} to {high:+.3f})", f"{same:.0%} the same"]
    elif pd.notna(row["kept_gate_mass"]):
        words = [f"no text of its own, {row['kept_gate_mass']:.0%} of the gate weight kept"]
    if row["dropped_gate_share"] > 0:
        words.append(f"{row['dropped_gate_share']:.1%} of the gate weight given up")
    return ", ".join(words) or "unchanged"


def _reference(name: str, ours: pd.DataFrame, made: pd.DataFrame) -> dict[str, str]:
    return {
        "reference": REFERENCES[name],
        "TPOT ms": f"{ours[f'{name}_tpot_ns'].loc['lru'] / 1e6:.2f}",
        "TPOT ms, made up": f"{made[f'{name}_tpot_ns'].loc['lru'] / 1e6:.2f}",
    }


def _parallel(table: pd.DataFrame) -> pd.DataFrame:
    lines = []
    several = table[table["topology"].notna()]
    for (side, topology), rows in several.groupby(["side", "topology"], sort=False):
        first = rows.iloc[0]
        head = {
            "trace": side,
            "machine": f"{first['ranks']:.0f} x {first['hardware']}, {topology}",
            "requests": f"{first['batch_size']:.0f}",
        }
        for _, row in rows.iterrows():
            moved, sent = (
                f"{row[column] / row['produced'] / 1e6:.2f}"
                for column in ("migration_bytes", "transport_bytes")
            )
            lines.append(
                head
                | {
                    "system": row["system"],
                    "TPOT ms": f"{row['tpot_ns'] / 1e6:.3f}",
                    "imbalance": f"{row['imbalance']:.3f}",
                    "moved MB a token": moved,
                    "sent MB a token": sent,
                    "hit rate": "1: all resident",
                }
            )
        for what, column in (
            ("even work, free transport (bound)", "balanced_tpot_ns"),
            ("one GPU that holds all", "all_resident_tpot_ns"),
        ):
            rest = {"moved MB a token": "0", "sent MB a token": "0", "hit rate": "1: all resident"}
            ms = f"{first[column] / 1e6:.3f}"
            lines.append(head | {"system": what, "TPOT ms": ms, "imbalance": "1.000"} | rest)
    return pd.DataFrame(lines)


def claims(table: pd.DataFrame) -> list[Claim]:
    return claims_of(by_cache(table), table[table["topology"].notna()])
