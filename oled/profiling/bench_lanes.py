"""The emulated lanes of this machine, one call at a time: what `backend=emulated` costs unpaced.

Weights are read cold: rows of a block larger than the caches, in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oled.hardware.this_machine import machine, processor
from oled.live.kernels import SILU, ExpertForm, compute, copy_poisoned, group_pairs, warm
from oled.live.store import FLOAT32, HostStore
from oled.models.catalogue import ModelGeometry
from oled.profiling.bench import MOST_TOKENS, Spread, Together, hand_off, timed
from oled.profiling.bench_dense import Dense

_BLOCK_BYTES = 96 * 2**20
_STREAM_BYTES = 192 * 2**20
_LONG_NS, _LONG_BYTES = 1_000_000, 8 * 2**20  # of a call


class LanesBench:
    """See `oled.profiling.bench.Bench`."""

    def __init__(self, model: ModelGeometry) -> None:
        self.backend = "emulated"
        self.device = processor()
        self.gpu = "none: a thread with the expert kernel"
        self.numbers = FLOAT32
        self.cpu_threads = 1
        self.facts = machine()
        self.absent = {
            "pageable copies": "there is no pinned memory: all copies are alike",
            "CPU experts by threads": "the CPU lane is one thread",
            "driver, link generation and width": "there is no device",
        }
        width = model.moe_intermediate_size
        self.form = ExpertForm(model.hidden_size, width, False, False, SILU, 0.0, 0.0)
        size = self.form.size * 4
        self._rows = max(2 * min(model.num_experts, 16), _BLOCK_BYTES // size)
        self._store = HostStore.random(self.form, np.array([self._rows]))
        self._slots = np.ones((max(8, -(-(2**26) // size)), self.form.size), np.float32)
        rng = np.random.default_rng(0)
        self._x = rng.standard_normal((MOST_TOKENS, model.hidden_size), dtype=np.float32)
        self._gated = np.zeros(self.form.width, np.float32)
        self._dense = Dense("cpu", self.numbers.name, _by_one_thread)

    def warm(self) -> None:
        warm()

    def close(self) -> None:
        self._store = HostStore.random(self.form, np.array([1]))
        self._slots = self._slots[:1].copy()

    def copy(self, size: int, *, inward: bool, pinned: bool) -> Spread:
        return timed(self._copying(size // 4, inward))

    def copy_alone(self, size: int, *, pinned: bool) -> Spread:
        return hand_off() + self.copy(size, inward=True, pinned=pinned)

    def pieces(self, count: int) -> Spread:
        one = self._copying(self.form.size // count, True)
        return timed(lambda turn: [one(count * turn + i) for i in range(count)])

    def _copying(self, numbers: int, inward: bool) -> Callable[[int], Any]:
        """Copies between the two blocks, wherever the last one ended."""
        store, slots = self._store.block.reshape(-1), self._slots.reshape(-1)

        def copy(turn: int) -> None:
            at, to = (turn * numbers) % (store.size - numbers + 1), 0
            if slots.size > numbers:
                to = (turn * numbers) % (slots.size - numbers + 1)
            host, device = store[at : at + numbers], slots[to : to + numbers]
            copy_poisoned(*((host, device) if inward else (device, host)))

        return copy

    def group(self, active: int, tokens: int, top_k: int) -> Spread:
        return timed(self._computing(active, tokens, top_k), 200)

    def cpu_expert(self, tokens: int, threads: int) -> Spread:
        return self.group(1, tokens, 1)

    def _computing(self, active: int, tokens: int, top_k: int) -> Callable[[int], Any]:
        ids = np.arange(tokens * top_k, dtype=np.int32) % active
        starts, pairs = np.zeros(active + 1, np.int64), np.zeros(ids.size, np.int64)
        group_pairs(ids, np.arange(active), starts, pairs)
        weight = np.ones(ids.size, np.float32)
        y = np.zeros((ids.size, self.form.hidden), np.float32)
        chosen = np.arange(active)
        gated = self._gated.copy()

        def call(turn: int) -> None:
            row = (np.arange(active) + turn * active) % self._rows
            compute(
                self._store.block,
                row,
                chosen,
                starts,
                pairs,
                top_k,
                self._x,
                weight,
                y,
                gated,
                self.form,
            )

        return call

    def together(self) -> Together:
        """In calls of a millisecond: what is looked for is the memory, not the interpreter."""
        one = timed(self._computing(1, 4, 1), 20)
        experts = int(np.clip(_LONG_NS / one.value, 1, self._rows // 2))
        copies = int(np.clip(_LONG_BYTES // (4 * self.form.size), 1, len(self._slots) // 2))
        tokens = min(MOST_TOKENS, 4 * experts)
        computing = self._computing(experts, tokens, -(-4 * experts // tokens))
        copying = self._copying(copies * self.form.size, True)
        return Together(
            cpu_alone=timed(computing).scaled(1 / experts),
            cpu_beside=_beside(copying, computing).scaled(1 / experts),
            copy_alone=timed(copying).scaled(1 / copies),
            copy_beside=_beside(computing, copying).scaled(1 / copies),
        )

    def lanes_beside(self) -> dict[str, float]:
        return {}

    def dense_layer(self, model: ModelGeometry, tokens: int, context: int) -> Spread:
        return self._dense.layer(model, tokens, context)

    def head(self, model: ModelGeometry, tokens: int) -> Spread:
        return self._dense.head(model, tokens)

    def elementwise(self) -> Spread:
        return self._dense.elementwise()

    def calls(self) -> dict[str, Spread]:
        form = ExpertForm(8, 8, False, False, SILU, 0.0, 0.0)
        block = np.zeros((1, form.size), np.float32)
        empty, starts = np.zeros(0, np.int64), np.zeros(2, np.int64)
        x, y, weight = np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32), self._gated[:1]
        gated = np.zeros(8, np.float32)

        def nothing(_: int) -> None:
            compute(block, starts, empty, starts, empty, 1, x, weight, y, gated, form)

        one_way = hand_off()
        return {"copy": timed(self._copying(2, True)), "launch": timed(nothing), "sync": one_way}

    def crossing(self, size: int) -> Spread:
        one_way = hand_off()
        return one_way + one_way

    def cpu_call(self) -> Spread:
        return hand_off() + self.calls()["launch"]

    def peak(self) -> tuple[int, Spread]:
        """Of the expert kernel, with the most tokens: it has no faster product."""
        return 6 * self.form.hidden * self.form.width * MOST_TOKENS, self.group(1, MOST_TOKENS, 1)

    def device_stream(self) -> tuple[int, Spread]:
        return self.host_stream()

    def host_stream(self) -> tuple[int, Spread]:
        source = np.ones(_STREAM_BYTES // 8, np.float32)
        target = np.zeros_like(source)
        return _STREAM_BYTES, timed(lambda _: np.copyto(target, source), 12)


def _by_one_thread(job: Callable[[int], Any]) -> Spread:
    """As the GPU lane computes experts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return timed(job)
    finally:
        torch.set_num_threads(before)


def _beside(other: Callable[[int], Any], job: Callable[[int], Any]) -> Spread:
    """Times of `job` while another thread runs `other` again and again."""
    stop = threading.Event()

    def run() -> None:
        turn = 0
        while not stop.is_set():
            other(turn)
            turn += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return timed(job)
    finally:
        stop.set()
        thread.join()
