"""A decode as the clock needs it: costs of a layer, and what each layer-step had to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

CONTENTION_POWER = 2.0
"""How link and CPU share the memory that both read: as their rates alone to this power.

1 is in proportion to demand, more favours the faster one. Chosen among 1, 1.5, 2 and 3 on the
development half of the bench (docs/field.md)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a host delivers, bytes per nanosecond (GB/s)."""

    cpu: float  # the CPU reads alone
    link: float  # copies alone
    both: float  # the sum while both run

    def shares(self) -> tuple[float, float]:
        """Return the rates of CPU and link while both run, as shares of their rates alone."""
        cpu, link = self.cpu**CONTENTION_POWER, self.link**CONTENTION_POWER
        of_cpu = min(self.cpu, self.both * cpu / (cpu + link))
        of_link = min(self.link, max(self.both - of_cpu, 0.02 * self.link))
        if of_link == self.link:  # what the link cannot use is the CPU's
            of_cpu = min(self.cpu, self.both - of_link)
        return of_cpu / self.cpu, of_link / self.link

    def scaled(self, times: float) -> Memory:
        return Memory(self.cpu * times, self.link * times, self.both * times)


@dataclass(frozen=True, slots=True)
class Events:
    """What the layer-steps of some tokens had to do; each int64[tokens, layers]."""

    cpu: Counts  # experts computed on the CPU
    copied: Counts  # experts copied in the step and computed on the GPU
    background: Counts  # copies asked for when the step is over, which nothing waits for
    ahead: Counts  # copies for the next layer-step, asked for when the step is over
    hits: Counts  # experts that are on the GPU


@dataclass(frozen=True, slots=True)
class Scenario:
    """One engine with one model on one host; times in nanoseconds."""

    dense_ns: float  # the GPU's part of a layer before its routing is known
    head_ns: float  # outside the layers, once a token
    gpu_expert_ns: float  # reading one expert on the GPU
    expert_bytes: float
    memory: Memory
    events: Events
    cpu_call_ns: float = 0.0  # once per layer-step with CPU experts
    copy_call_ns: float = 0.0  # once per copy
    ahead_used: float = 1.0  # share of the copies ahead that the next layer-step waits for

    @property
    def layers(self) -> int:
        return int(self.events.cpu.shape[1])

    @property
    def cpu_expert_ns(self) -> float:
        return self.expert_bytes / self.memory.cpu

    @property
    def copy_ns(self) -> float:
        return self.copy_call_ns + self.expert_bytes / self.memory.link

    def at(self, memory: float, gpu: float) -> Scenario:
        """Return the same with memory and link `memory` times as fast, the GPU `gpu` times."""
        return replace(
            self,
            memory=self.memory.scaled(memory),
            dense_ns=self.dense_ns / gpu,
            head_ns=self.head_ns / gpu,
            gpu_expert_ns=self.gpu_expert_ns / gpu,
            cpu_call_ns=self.cpu_call_ns / gpu,
        )
