"""Catalogues of named parts: GPUs, CPUs, models, quantisations, engines (CSV files here)."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oled.field.scenario import Memory

HERE = Path(__file__).parent
LINK_GBPS = {(3, 16): 12.3, (4, 16): 25.0, (5, 16): 53.0, (3, 8): 6.2, (4, 8): 12.3, (5, 8): 26.0}
"""Pinned copies to the GPU by generation and lanes, as measured (conf/hardware)."""

READ_SHARE = {"desktop": 0.66, "server": 0.50}
"""Of the memory's peak that threads read: 0.56 to 0.68 on the bench's development desktops; servers
from 0.3 (two sockets, far memory) to 0.8."""
BOTH_SHARE = 1.1
"""Of the CPU's read rate that CPU and link reach together: 1.0 to 1.36 there."""
THREADS = {
    "desktop": ((1, 4, 8, 12), (0.55, 0.85, 0.97, 1.0)),
    "server": ((1, 4, 8, 12, 16), (0.15, 0.5, 0.75, 0.9, 1.0)),
}
"""Read rate by threads, over the highest: means of the development hosts' curves (six desktops, two
servers, which lie 0.1 to 0.3 apart at few threads)."""
TOO_MANY = ((1.0, 2.0, 4.0), (1.0, 0.8, 0.5))
"""The same by threads over cores, from 107c and 107d: 0.79 at twice the cores, 0.57 beyond."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card by its data sheet."""

    name: str
    memory_gbps: float
    link_generation: int
    link_lanes: int


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor by its data sheet, with the fastest memory that its maker supports."""

    name: str
    cores: int
    channels: int
    memory_mts: float
    link_generation: int
    kind: str  # desktop or server

    @property
    def memory_gbps(self) -> float:
        """One socket's peak."""
        return self.channels * self.memory_mts * 8 / 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as far as its decode speed needs it."""

    name: str
    layers: int  # with routed experts
    dense_layers: int
    experts: int
    top_k: int
    expert_params: int
    active_params: float  # nominal, a token
    lru: tuple[float, float]  # a and b of `oled.field.events.lru_misses`
    kv_bytes: float  # of one cached token, bf16; layers without a cache not counted

    @property
    def other_params(self) -> float:
        """Weights that every token reads beside its routed experts."""
        routed = self.layers * self.top_k * self.expert_params
        return max(0.15 * self.active_params, self.active_params - routed)


@dataclass(frozen=True, slots=True)
class Engine:
    """What a runtime adds: on the GPU's path a layer, on a hand-off to the CPU, on a copy."""

    name: str
    layer_ns: float
    handoff_ns: float
    copy_ns: float


@functools.cache
def _rows(file: str) -> tuple[dict[str, str], ...]:
    with (HERE / file).open(encoding="utf-8", newline="") as text:
        return tuple(csv.DictReader(text))


def names(catalogue: str) -> list[str]:
    """Return the names that a catalogue (`gpus`, `cpus`) holds."""
    return [next(iter(row.values())) for row in _rows(f"{catalogue}.csv")]


def gpu(text: str) -> Gpu | None:
    """Return the card that a text names, None if none or not one of the catalogue."""
    row = _named("gpus.csv", "gpu", text)
    if row is None:
        return None
    lanes = int(row["link_lanes"])
    return Gpu(row["gpu"], float(row["memory_gbps"]), int(row["link_generation"]), lanes)


def cpu(text: str) -> Cpu | None:
    """Return the processor that a text names."""
    row = _named("cpus.csv", "cpu", text)
    if row is None:
        return None
    return Cpu(
        row["cpu"],
        int(row["cores"]),
        int(row["channels"]),
        float(row["memory_mts"]),
        int(row["link_generation"]),
        row["kind"],
    )


def shape(text: str) -> Shape | None:
    """Return the model that a text names."""
    row = _named("models.csv", "pattern", text)
    if row is None:
        return None
    return Shape(
        row["name"],
        int(row["layers"]),
        int(row["dense_layers"]),
        int(row["experts"]),
        int(row["top_k"]),
        3 * int(row["hidden"]) * int(row["width"]),
        1e9 * float(row["active_b"]),
        (float(row["lru_a"]), float(row["lru_b"])),
        float(row["kv_bytes"]),
    )


def quant(text: str) -> tuple[float, float] | None:
    """Return bytes a weight of routed experts and of everything else."""
    row = _named("quants.csv", "pattern", text)
    if row is None:
        return None
    return float(row["bytes_per_weight"]), float(row["dense_bytes_per_weight"])


def engine(text: str) -> Engine | None:
    """Return the runtime that a text names."""
    row = _named("engines.csv", "pattern", text)
    if row is None:
        return None
    times = (1000 * float(row[key]) for key in ("layer_us", "handoff_us", "copy_us"))
    return Engine(row["name"], *times)


def link_gbps(card: Gpu, host: Cpu | None) -> float:
    """Return what a pinned copy reaches, by the older of the two generations."""
    generation = min(card.link_generation, host.link_generation if host else card.link_generation)
    return LINK_GBPS[generation, card.link_lanes]


def thread_share(host: Cpu, threads: float) -> float:
    """Return the share of a host's read rate that so many threads reach.

    More threads than cores read slower: they wait for one another.
    """
    few, shares = THREADS[host.kind]
    rising = float(np.interp(threads, few, shares))
    return rising * float(np.interp(threads / host.cores, *TOO_MANY))


def memory(card: Gpu, host: Cpu) -> Memory:
    """Return what a host of these parts delivers, by their data sheets."""
    read = READ_SHARE[host.kind] * host.memory_gbps
    link = min(link_gbps(card, host), read)
    return Memory(read, link, min(read + link, BOTH_SHARE * read))


def ram_gbps(text: str, host: Cpu | None) -> float | None:
    """Return the peak of the memory that a text describes: speed by channels, None if no speed."""
    speed = re.search(r"DDR[345]X?-?(\d{4})", text) or re.search(r"DDR\d [^\d]*(\d{4})", text)
    if speed is None:
        return None
    stated = re.search(r"(\d+) ?(?:ch\b|channels)", text) or re.match(r"(\d+)x", text)
    words = {"dual": 2, "quad": 4, "octa": 8}
    channels = next((n for word, n in words.items() if word in text), None)
    most = host.channels if host else 2
    if channels is None:
        channels = int(stated[1]) if stated else most
    return min(channels, max(most, 2) * 2) * float(speed[1]) * 8 / 1000


def _named(file: str, column: str, text: str) -> dict[str, str] | None:
    """Return the first row whose name stands in the text, not inside a longer word."""
    for row in _rows(file):
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(row[column])}(?![0-9])", text):
            return row
    return None
