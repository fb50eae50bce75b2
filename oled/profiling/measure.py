"""`oled profile`: what this machine costs, as a profile of conf/hardware.

Each time is the median of many single calls, with the 10th and 90th percentile, clocks warm and the
device synchronised. What the cost model computes from are the profile's numbers and tables; beside
them stand, for readers, `measurements` of more than it needs and what is `absent`, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oled.hardware.profile import DIMENSIONS, load_profile
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.profiling.bench import MOST_TOKENS, Bench, Spread
from oled.profiling.file import (
    Number,
    flops_of,
    number,
    put_in,
    rate_of,
    spreads,
    table_of,
    time_of,
)
from oled.sim import bench as simulator

log = logging.getLogger("oled")

_TOKENS = (1, 2, 4, 8, 16, 32, 64, MOST_TOKENS)
_ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128)
_SIZES = tuple(2**power for power in range(12, 27, 2))  # 4 KiB to 64 MiB
_CONTEXTS = (0, 512, 768, 1024, 4096)
_BLOCK, _CONTEXT = 16, 768  # of `dense_layer_*`
_MINI, _FLASH = model_geometry("llada2_mini"), model_geometry("llada2_flash")
_FITTED = "a fit of the table"


@dataclass(frozen=True, slots=True)
class Part:
    """What one section of the measurement gives the profile."""

    numbers: dict[str, Number]
    measurements: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)


Section = Callable[[Bench, ModelGeometry, Mapping[str, Number]], Part]
"""Also sees the numbers of the sections before it."""


def measure(bench: Bench, model: ModelGeometry, date: str) -> dict[str, Any]:
    """The profile as a mapping, in the form of conf/hardware. It takes about two minutes."""
    sections: list[tuple[str, Section]] = [
        (f"copies by size; an expert of {model.name} has {_size(bench) / 2**20:.2f} MiB", _link),
        ("launch groups by tokens and active experts", _groups),
        ("CPU experts by tokens and threads, and beside copies", _cpu),
        ("layers without routed experts, by tokens and context", _dense),
        ("launches, synchronisation, deciding", _calls),
    ]
    bench.warm()
    parts: list[Part] = []
    numbers: dict[str, Number] = {}
    for index, (text, section) in enumerate(sections):
        log.info("%d of %d: %s", index + 1, len(sections), text)
        parts.append(section(bench, model, numbers))
        numbers |= parts[-1].numbers
    profile: dict[str, Any] = {
        "name": bench.backend,
        "description": f"{bench.device}, measured with experts of {model.name}",
        "gpu": bench.gpu,
        "host": f"{bench.facts['processor']}, {bench.facts['cpus']} CPUs; {date}",
        "dtype": bench.numbers.name,
        "device": bench.device,
        **{name: numbers[name] for name in DIMENSIONS},
    }
    for part in parts:
        profile |= part.tables
    profile["machine"] = {**bench.facts, "date": date}
    profile["measurements"] = {k: v for part in parts for k, v in part.measurements.items()}
    profile["absent"] = bench.absent
    load_profile(profile)  # what does not load is not written
    return profile


def _size(bench: Bench) -> int:
    """Bytes of an expert."""
    return bench.form.size * bench.numbers.bytes


def _link(bench: Bench, model: ModelGeometry, _: Mapping[str, Number]) -> Part:
    """Rates at the expert's own size: what its copy takes above the smallest copy's time."""
    size, memories = _size(bench), ["pinned"]
    if "pageable copies" not in bench.absent:
        memories.append("pageable")
    tables: dict[str, Any] = {"bytes": sorted({*_SIZES, size})}
    numbers: dict[str, Number] = {}
    smallest: dict[str, Spread] = {}
    for memory in memories:
        for way, inward in (("h2d", True), ("d2h", False)):
            times = {
                n: bench.copy(n, inward=inward, pinned=memory == "pinned") for n in tables["bytes"]
            }
            least = times[_SIZES[0]]
            numbers[f"{way}_{memory}"] = rate_of(size, _minus(times[size], least.value))
            smallest[f"{way}_{memory}"] = least
            tables[f"{way}_{memory}_us"] = list(
                spreads({str(n): t for n, t in times.items()}).values()
            )
    alone = bench.copy_alone(_SIZES[0], pinned=True)
    numbers["copy_queued"] = time_of(smallest["h2d_pinned"])
    numbers["copy_isolated"] = time_of(_at_least(alone, smallest["h2d_pinned"]))
    pageable = put_in(0.0, "us", bench.absent.get("pageable copies", ""))
    if "pageable" in memories:
        longer = bench.copy_alone(_SIZES[0], pinned=False)
        pageable = time_of(_minus(longer, alone.value))
    numbers["copy_pageable"] = pageable
    for way in ("h2d", "d2h"):
        numbers.setdefault(f"{way}_pageable", numbers[f"{way}_pinned"])
    numbers["act_roundtrip"] = time_of(bench.crossing(_SIZES[0]))  # its bytes do not count
    expert = {f"{count} copies": bench.pieces(count) for count in (1, 3)}
    return Part(numbers, {"copies": tables, "an expert in so many copies_us": spreads(expert)})


def _groups(bench: Bench, model: ModelGeometry, _: Mapping[str, Number]) -> Part:
    actives = sorted({*(n for n in _ACTIVE if n < model.num_experts), model.num_experts})
    grid = [
        [
            bench.group(n, tokens, model.top_k) if n <= tokens * model.top_k else None
            for n in actives
        ]
        for tokens in _TOKENS
    ]
    table = {
        "expert_bytes": _size(bench),
        "top_k": model.top_k,
        "tokens": list(_TOKENS),
        "active": actives,
        "time": table_of(grid),
    }
    moved, stream = bench.device_stream()
    numbers = {"gpu_mem": rate_of(moved, stream), **_formula_of(bench, model, actives, grid)}
    return Part(numbers, tables={"gpu_tables": [table]})


def _formula_of(
    bench: Bench,
    model: ModelGeometry,
    actives: Sequence[int],
    grid: Sequence[Sequence[Spread | None]],
) -> dict[str, Number]:
    """The launch groups as the cost model's formula, for experts that have no table."""
    row = [cell for cell in grid[_TOKENS.index(_BLOCK)] if cell is not None]
    first, last = row[0], row[-1]
    slope = (last.value - first.value) / (actives[len(row) - 1] - actives[0])
    per_expert = slope if slope > 0 else first.value
    read = Spread(*(per_expert * end / last.value for end in (last.low, last.value, last.high)))
    count, peak = bench.peak()
    flops = 2 * model.expert_params * model.top_k  # of a token
    most = grid[-1][-1] or last
    share = min(1.0, (flops * _TOKENS[-1] / most.value) / (count / peak.value))
    arithmetic = flops * _BLOCK / (share * count / peak.value)
    begin = max(0.0, first.value - max(per_expert * actives[0], arithmetic))
    where = f"{_TOKENS[-1]} tokens, {actives[-1]} experts"
    return {
        "moe_eff": rate_of(_size(bench), read, "derived", _FITTED),
        "moe_t0": number(0.0, begin / 1e3, first.high / 1e3, "us", "derived", _FITTED),
        "bf16_peak": flops_of(count, peak),
        "moe_gemm_share": number(share, share, 1.0, "1", "derived", where),
    }


def _seen(rate: Number, *others: Number) -> Number:
    """Return `rate` with each end raised to the largest of `others`: memory gave them that much."""
    ends = {end: max(n[end] for n in (rate, *others)) for end in ("low", "value", "high")}
    return {**rate, **ends}


def _cpu(bench: Bench, model: ModelGeometry, known: Mapping[str, Number]) -> Part:
    """`dram_share` is such that the cost model slows both down as much as was measured."""
    size = _size(bench)
    by_tokens = [bench.cpu_expert(tokens, bench.cpu_threads) for tokens in _TOKENS]
    read, arithmetic = rate_of(size, by_tokens[0]), 2 * model.expert_params * _TOKENS[-1]
    gemm = flops_of(arithmetic, by_tokens[-1])
    moved, stream = bench.host_stream()
    together = bench.together()
    slower = {
        "cpu_expert": together.cpu_beside.value / together.cpu_alone.value,
        "copy": together.copy_beside.value / together.copy_alone.value,
    }
    speeds = sorted(min(1.0, 1 / times) for times in slower.values())
    memory = _seen(rate_of(moved, stream), read, known["h2d_pinned"], known["d2h_pinned"])
    copy_ns = 1e3 * known["copy_queued"]["value"] + size / known["h2d_pinned"]["value"]
    alone = (read["value"] + size / copy_ns) / memory["value"]  # as `formulas.contention` does
    low, share, high = speeds[0] * alone, sum(speeds) / 2 * alone, speeds[1] * alone
    numbers = {
        "cpu_stream": memory,
        "dram_share": number(
            low, share, high, "1", "derived", "speeds while both run, by rates alone"
        ),
        "pageable_dram_passes": put_in(2.0, "passes", "staging copy: read and written once more"),
        "cpu_expert_tuned": read,
        "cpu_expert_torch": read,
        "cpu_gemm_tuned": gemm,
        "cpu_gemm_torch": gemm,
        "cpu_token_tile": put_in(1.0, "tokens", "the table has the tiles"),
        "cpu_call": time_of(bench.cpu_call()),
    }
    measurements: dict[str, Any] = {
        "cpu_expert_by_threads_us": spreads(_by_threads(bench)),
        "weights_read_at_stream_rate_us": round(size / (moved / stream.value) / 1e3, 2),
        "times_slower_beside_the_other": {k: round(v, 3) for k, v in slower.items()},
    }
    if beside := bench.lanes_beside():
        measurements["times_slower_beside_another_lane"] = beside
    times = table_of([[t] for t in by_tokens])
    table = {"expert_bytes": size, "tokens": list(_TOKENS), "time": times}
    return Part(numbers, measurements, {"cpu_tables": [table]})


def _by_threads(bench: Bench) -> dict[str, Spread]:
    """Measure an expert of 1 and 16 tokens with 1, 2, 4, ... threads."""
    return {
        f"{count} threads, {tokens} tokens": bench.cpu_expert(tokens, count)
        for count in _halves(bench.cpu_threads)
        for tokens in (1, _BLOCK)
    }


def _dense(bench: Bench, model: ModelGeometry, _: Mapping[str, Number]) -> Part:
    """The points and the slope of the cost model, and a grid of the model that was asked for."""
    mini, flash = (bench.dense_layer(m, _BLOCK, _CONTEXT) for m in (_MINI, _FLASH))
    near, far = (bench.dense_layer(_MINI, _BLOCK, n) for n in (512, 4096))
    key = max(0.0, far.value - near.value) / (4096 - 512)
    ends = [max(0.0, b - a) / (4096 - 512) for a, b in ((near.high, far.low), (near.low, far.high))]
    numbers = {
        "dense_layer_mini": time_of(mini),
        "dense_layer_flash": time_of(_at_least(flash, mini)),
        "attention_key": number(ends[0], key, ends[1], "ns", "derived", "512 to 4096 keys"),
        "lm_head_mini": time_of(bench.head(_MINI, _BLOCK)),
        "elementwise": time_of(bench.elementwise()),
    }
    grid = {
        f"{tokens} tokens, {context} cached": bench.dense_layer(model, tokens, context)
        for tokens in (1, _BLOCK, 2 * _BLOCK)
        for context in _CONTEXTS
    }
    return Part(numbers, {f"dense_layer_{model.name}_us": spreads(grid)})


def _calls(bench: Bench, model: ModelGeometry, _: Mapping[str, Number]) -> Part:
    """Host times. Deciding is that of the simulator's compiled policies, without a live run's
    tables and lists.
    """
    calls = bench.calls()
    decided = simulator.decide(100)["decide_ns_per_forward"] / len(_MINI.moe_layers)
    return Part(
        {"memcpy_host_call": time_of(calls["copy"])},
        {
            "host_calls_us": spreads(calls),
            "deciding_us_per_moe_layer": {"oled, llada2_mini": round(decided / 1e3, 2)},
        },
    )


def _minus(time_ns: Spread, less_ns: float) -> Spread:
    """A part of a time; at least 1 ns of it is left."""
    low, value, high = (
        max(1.0, end - less_ns) for end in (time_ns.low, time_ns.value, time_ns.high)
    )
    return Spread(low, value, high)


def _at_least(time_ns: Spread, least: Spread) -> Spread:
    """The same, nowhere below another: the cost model takes differences of the two."""
    return Spread(
        max(time_ns.low, least.low), max(time_ns.value, least.value), max(time_ns.high, least.high)
    )


def _halves(most: int) -> list[int]:
    """1, 2, 4, … and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
