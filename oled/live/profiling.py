"""`oled profile backend=emulated`: what this machine's emulated lanes really cost, as a profile.

Each time is the median of many single calls, with the 10th and 90th percentile; weights are read
cold (the rows of a block larger than the caches, in turn). Bytes are float32, as they are moved.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from oled.hardware.formulas import DENSE_PARAMS
from oled.hardware.profile import load_profile
from oled.live import bench as b
from oled.live.bench import Bench, Spread
from oled.live.machine import processor
from oled.models.catalogue import ModelGeometry, model_geometry

log = logging.getLogger("oled")

_TOKENS = (1, 2, 4, 8, 16, 32, b.MOST_TOKENS)
_ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128)
_SOURCE = "this machine"


def measure_emulated(model: ModelGeometry, date: str) -> dict[str, Any]:
    """The profile as a mapping, in the form of conf/hardware."""
    bench = Bench(model)
    log.info("copies of %s experts (%.2f MiB in float32)", model.name, bench.bytes / 2**20)
    copy, tiny_copy = bench.copies(), b.tiny_copy()
    hand_off, put = b.hand_off(), b.timed(2000, b.put())
    log.info("CPU experts by tokens")
    cpu = [bench.group(1, tokens, 1) for tokens in _TOKENS]
    actives = [n for n in _ACTIVE if n <= min(model.num_experts, bench.rows)]
    grid: list[list[Spread | None]] = []
    for tokens in _TOKENS:
        log.info("launch groups of %d tokens", tokens)
        grid.append([_cell(bench, active, tokens) for active in actives])
    stream = _rate(b.STREAM_BYTES, b.stream())
    call = b.call_overhead()
    read = _rate(bench.bytes, cpu[0])
    arithmetic = _flops(bench.flops * _TOKENS[-1], cpu[-1])
    per_flop = cpu[-1].scaled(1 / (bench.flops * _TOKENS[-1]))
    dense = [per_flop.scaled(2 * params * 16) for params in DENSE_PARAMS]
    mini = model_geometry("llada2_mini")
    head = per_flop.scaled(2 * mini.vocab_size * mini.hidden_size * 16)
    derived = "16 tokens at the arithmetic of the expert kernel"
    link = _rate(bench.bytes, copy)
    profile: dict[str, Any] = {
        "name": "emulated",
        "description": f"the emulated lanes of a CPU machine, measured with {model.name}'s experts",
        "gpu": "none: a thread with the expert kernel",
        "host": f"{processor()}, {os.cpu_count()} CPUs, {platform.system()}; {date}",
        "dtype": "float32",
        "h2d_pinned": link,
        "d2h_pinned": link,
        "h2d_pageable": link,
        "d2h_pageable": link,
        "copy_isolated": _quantity(hand_off + tiny_copy, "us", 1e3),
        "copy_queued": _quantity(tiny_copy, "us", 1e3),
        "copy_pageable": _put_in(0.0, "us", "there is no pinned memory"),
        "memcpy_host_call": _quantity(put, "us", 1e3),
        "gpu_mem": stream,
        "moe_eff": read,
        "moe_t0": _quantity(call, "us", 1e3),
        "moe_gemm_share": _put_in(1.0, "1", "bf16_peak is that of the expert kernel"),
        "bf16_peak": arithmetic,
        "dense_layer_mini": _quantity(dense[0], "us", 1e3, "derived", derived),
        "dense_layer_flash": _quantity(dense[1], "us", 1e3, "derived", derived),
        "attention_key": _quantity(
            per_flop.scaled(4 * 16 * mini.num_heads * mini.head_dim), "ns", 1, "derived", derived
        ),
        "lm_head_mini": _quantity(head, "us", 1e3, "derived", derived),
        "elementwise": _quantity(b.elementwise(), "us", 1e3),
        "cpu_stream": stream,
        "dram_share": _put_in(0.93, "1", "not measured; as the other profiles"),
        "pageable_dram_passes": _put_in(1.0, "passes", "there is no pinned memory"),
        "cpu_expert_tuned": read,
        "cpu_expert_torch": read,
        "cpu_gemm_tuned": arithmetic,
        "cpu_gemm_torch": arithmetic,
        "cpu_token_tile": _put_in(1.0, "tokens", "the kernel has no tiles"),
        "cpu_call": _quantity(hand_off + call, "us", 1e3),
        "act_roundtrip": _quantity(hand_off + hand_off, "us", 1e3),
        "gpu_tables": [
            {
                "expert_bytes": bench.bytes,
                "top_k": model.top_k,
                "tokens": list(_TOKENS),
                "active": actives,
                "time": _table(grid),
            }
        ],
        "cpu_tables": [
            {
                "expert_bytes": bench.bytes,
                "tokens": list(_TOKENS),
                "time": _table([[spread] for spread in cpu]),
            }
        ],
    }
    load_profile(profile)  # what does not load is not written
    return profile


def _cell(bench: Bench, active: int, tokens: int) -> Spread | None:
    """A launch group; None where so few tokens cannot reach so many experts."""
    top_k = bench.model.top_k
    return bench.group(active, tokens, top_k) if active <= tokens * top_k else None


def write_profile(profile: dict[str, Any], file: Path) -> Path:
    """One line a number, as the shipped profiles."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Written by `oled profile`. Format, tags: conf/hardware/README.md.",
        "# Spread: 10th and 90th percentile of single calls.",
    ]
    for key, value in profile.items():
        if isinstance(value, list):
            text = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=None)
            lines.append(text.rstrip())
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
            lines.append(f"{key}: {text.removesuffix('...' + chr(10)).strip()}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _quantity(
    time_ns: Spread, unit: str, scale: float, tag: str = "measured", source: str = _SOURCE
) -> dict[str, Any]:
    return _mapping(
        time_ns.low / scale, time_ns.value / scale, time_ns.high / scale, unit, tag, source
    )


def _mapping(
    low: float, value: float, high: float, unit: str, tag: str, source: str
) -> dict[str, Any]:
    rounded = [float(f"{number:.4g}") for number in (value, low, high)]
    return dict(
        zip(
            ("value", "low", "high", "unit", "tag", "source"),
            (*rounded, unit, tag, source),
            strict=True,
        )
    )


def _put_in(value: float, unit: str, why: str) -> dict[str, Any]:
    return _mapping(value, value, value, unit, "assumed", why)


def _rate(size: int, time_ns: Spread) -> dict[str, Any]:
    """GB/s: bytes a nanosecond."""
    ends = (size / time_ns.high, size / time_ns.value, size / time_ns.low)
    return _mapping(*ends, "GB/s", "measured", _SOURCE)


def _flops(count: int, time_ns: Spread) -> dict[str, Any]:
    ends = (count / time_ns.high, count / time_ns.value, count / time_ns.low)
    return _mapping(*ends, "GFLOPS", "measured", _SOURCE)


def _table(grid: Sequence[Sequence[Spread | None]]) -> dict[str, Any]:
    def times(end: str) -> list[list[float | None]]:
        return [
            [None if cell is None else round(getattr(cell, end) / 1e3, 2) for cell in line]
            for line in grid
        ]

    ends: dict[str, Any] = {end: times(end) for end in ("value", "low", "high")}
    return {**ends, "unit": "us", "tag": "measured", "source": _SOURCE}
