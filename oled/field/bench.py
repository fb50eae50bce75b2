"""The bench: hosts that were probed, an engine whose misses, copies and CPU experts are counted.

Where a row does not state its counts, those of the same model, policy and share on development
machines are taken (`bench_counts.csv`): the engine's decisions do not depend on the host, but for
the table that says how many of a layer's misses it copies.
"""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.field import parts
from oled.field.events import Split, lru_misses, quickest_table, stated, static_layers
from oled.field.scenario import Memory, Scenario
from oled.field.tables import Facts, UnpredictableError, needed, number

COUNTS = ("misses_per_token", "cpu_per_token", "fetched_in_step_per_token")
LAYER_NS = 55_000.0
"""The GPU's time of a layer beside reading weights, where it was not profiled: launches and small
kernels. From the development machines' profiles: 50 to 63 us for two models."""
READ_SHARE = 0.94
"""The share of a card's data sheet that the bench's own device probe reads."""
AHEAD_USED = 0.84
"""Copies ahead that the next layer used, as its author counted."""
ADMITTED = ("one read", "in-step copy", "once ahead")
"""Policies that copy a miss because the cache takes it in; the others have a table."""
ADMITTED_SHARE = 0.5
"""Of a clairvoyant's misses those that it takes in, where that is not stated: 0.50 and 0.59 of the
exact set's at 11 and 25 % (development machines)."""
CPU_ONLY = (
    "CPU-only",
    "static cache",
    "mailbox",
    "no expert resident",
    "replacement",
    "+ GPU",
    "+ slot",
)
"""Words of policies that compute every miss on the CPU."""
HELPERS_BESIDE = 2
"""Cores that the engine leaves to itself: helpers are usable cores less these."""
BARRIER_NS = 21.0
"""A CPU layer's hand-off and barrier are this times the helpers squared: each helper's arrival
moves a line that all others read. From the two development servers with many helpers: 330 us at
126, 76 us at 59, whatever the model; nothing at the 6 to 22 of desktops."""
LLAMA_CPP_HANDOFF_NS = 60_000.0


def scenario(facts: Facts) -> Scenario:
    """Return the scenario of a row with its host's probes.

    Raises: UnpredictableError.
    """
    if facts["policy_class"] == "FreeToken":
        raise UnpredictableError("another engine, by a backend of it that is not modelled")
    layers, top_k = int(needed(facts, "moe_layers")), int(needed(facts, "top_k"))
    stated_size = facts["bytes_per_expert"]
    size = needed(facts, "bytes_per_expert") if stated_size else _expert_bytes(facts)
    card = parts.gpu(facts["gpu"])
    read = number(facts, "device_read_gbps") or (card and READ_SHARE * card.memory_gbps)
    if not read:
        raise UnpredictableError(f"GPU '{facts['gpu']}' is not in the catalogue")
    memory = _memory(facts)
    static = number(facts, "n_cpu_moe")
    if static is None and "static layers" in facts["policy_class"]:
        static = round(layers * (1 - (number(facts, "share_pct") or 0.0) / 100))
    handoff = BARRIER_NS * _helpers(facts) ** 2
    if static is not None:
        events = static_layers(layers, top_k, min(layers, int(static)))
        if facts["policy"].startswith("llama.cpp"):
            handoff = LLAMA_CPP_HANDOFF_NS
    else:
        counts = _counts(facts, layers, top_k, quickest_table(memory, size, top_k))
        split: Split = "admitted" if _admitted(facts) else "table"
        events = stated(layers, top_k, **counts, split=split)
    expert_ns = size / read
    hits = float(events.hits.sum()) / events.hits.shape[0]
    gpu_ns = _gpu_ns(facts, layers, read, hits * expert_ns)
    return Scenario(
        dense_ns=max(0.0, gpu_ns - hits * expert_ns) / layers,
        head_ns=0.0,
        gpu_expert_ns=expert_ns,
        expert_bytes=size,
        memory=memory,
        events=events,
        cpu_call_ns=handoff,
        ahead_used=AHEAD_USED,
    )


def _gpu_ns(facts: Facts, layers: int, read: float, experts_ns: float) -> float:
    """Return the GPU's time a token: profiled, else weights at the card's rate and launches."""
    profiled = number(facts, "G_ms")
    if profiled is not None:
        return 1e6 * profiled
    shape = parts.shape(facts["model"])
    if shape is None:
        raise UnpredictableError(f"model '{facts['model']}' is not in the catalogue")
    dense = parts.quant(facts["quant"])
    if dense is None:
        raise UnpredictableError(f"quantisation '{facts['quant']}' is not in the catalogue")
    per_weight = 2.0 if shape.name.startswith("gpt_oss") else dense[1]
    return layers * LAYER_NS + shape.other_params * per_weight / read + experts_ns


def _expert_bytes(facts: Facts) -> float:
    shape, per_weight = parts.shape(facts["model"]), parts.quant(facts["quant"])
    if shape is None or per_weight is None:
        raise UnpredictableError("the bytes of an expert are neither stated nor known by name")
    return shape.expert_params * per_weight[0]


def probed(facts: Facts) -> bool:
    """Whether the host's three rates were measured; else they are those of its parts."""
    return _probes(facts) is not None


def _memory(facts: Facts) -> Memory:
    found = _probes(facts)
    if found is not None:
        return found
    card, host = parts.gpu(facts["gpu"]), parts.cpu(facts["cpu"])
    if card is None or host is None:
        raise UnpredictableError("the host has no probes, and its parts are not known by name")
    return parts.memory(card, host)


def _probes(facts: Facts) -> Memory | None:
    link = number(facts, "h2d_zerocopy_gbps")
    both = number(facts, "both_at_once_gbps_median")
    cpu = number(facts, "cpu_read_gbps_at_helpers") or _from_curve(facts)
    if not cpu or not link or not both:
        return None
    return Memory(cpu, link, both)


def _from_curve(facts: Facts) -> float | None:
    """Return the CPU's read rate at the engine's helpers, from the curve of threads."""
    curve = facts.get("cpu_read_curve_threads_gbps", "")
    helpers = _helpers(facts)
    if not curve or not helpers:
        return None
    points = [pair.split(":") for pair in curve.split(";")]
    threads, rates = ([float(pair[i]) for pair in points] for i in (0, 1))
    return float(np.interp(helpers, threads, rates))


def _helpers(facts: Facts) -> float:
    """Return the threads that compute experts: stated, else the cores left; 0 if not known."""
    named = parts.cpu(facts["cpu"])
    usable = re.match(r"\d+", facts.get("usable_cores", ""))
    cores = float(usable[0]) if usable else float(named.cores if named else HELPERS_BESIDE)
    return number(facts, "helper_threads") or cores - HELPERS_BESIDE


def _admitted(facts: Facts) -> bool:
    return any(words in facts["policy_class"] for words in ADMITTED)


def _counts(facts: Facts, layers: int, top_k: int, table: NDArray[np.int64]) -> dict[str, Any]:
    """Return misses and copies, as stated, else of the same policy.

    Where copies in the step are not stated, the table of the engine's own law says how many.
    """
    known = _known_counts().get((facts["model"], facts["policy"], _share(facts)), {})

    def value(column: str) -> float | None:
        own = number(facts, column)
        return own if own is not None else known.get(column)

    missing = value("misses_per_token")
    if missing is None:
        hit = number(facts, "hit_rate")
        missing = layers * top_k * (_lru(facts) if hit is None else 1 - hit)
    copied: Any = number(facts, COUNTS[2])
    on_cpu = number(facts, "cpu_per_token")
    if copied is None and on_cpu is not None:
        copied = missing - on_cpu
    if copied is None:
        only_cpu = any(words in f"{facts['policy']} {facts['policy_class']}" for words in CPU_ONLY)
        copied = 0.0 if only_cpu else table
    if isinstance(copied, np.ndarray) and _admitted(facts):
        copied = ADMITTED_SHARE * missing
    if "all misses" in facts["policy_class"]:
        copied = missing
    return {
        "missing": missing,
        "copied": copied,
        "background": value("background_admits_per_token") or 0.0,
        "ahead": value("prefetch_copies_per_token") or 0.0,
    }


def _lru(facts: Facts) -> float:
    """Return the share of requests that an LRU cache of the row's size misses."""
    shape = parts.shape(facts["model"])
    if shape is None:
        raise UnpredictableError(f"model '{facts['model']}' is not in the catalogue")
    return lru_misses((number(facts, "share_pct") or 0.0) / 100, shape.lru)


def _share(facts: Facts) -> str:
    share = number(facts, "share_pct")
    return "" if share is None else f"{share:.1f}"


@functools.cache
def _known_counts() -> dict[tuple[str, str, str], dict[str, float]]:
    with (Path(__file__).parent / "bench_counts.csv").open(encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))
    numbers = [name for name in rows[0] if name.endswith("_per_token")]
    return {
        (row["model"], row["policy"], row["share_pct"]): {
            name: float(row[name]) for name in numbers if row[name]
        }
        for row in rows
    }
