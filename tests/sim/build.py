"""Small cases by hand: steps, costs and policies without a trace, a profile or a YAML file.

A forward is `Forward({layer: {expert: tokens}})`; the order of the experts is the order of their
last mention. Costs are straight lines, so that a test can work a time out in its head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from oled.hardware.costs import CostTables
from oled.policies.composition import Composition
from oled.policies.interface import ABSENT, ON_CPU, TRANSFER, Admission
from oled.policies.part import Allocation, Dispatch, Prefetch, Retention
from oled.policies.retention.lru import Lru
from oled.sim.calibration import Calibration
from oled.sim.prepare import Replay, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots
from oled.trace.schema import Phase
from oled.trace.steps import Steps


@dataclasses.dataclass(frozen=True)
class Forward:
    layers: Mapping[int, Mapping[int, int]]  # layer -> expert -> tokens
    request: int = 0
    phase: Phase = Phase.DENOISE
    tokens: int | None = None  # as many as the busiest layer needs
    block: int = 0
    step: int = 0
    produced: int = 1


def make_steps(
    forwards: Sequence[Forward],
    num_experts: Sequence[int],
    top_k: int = 1,
    expert_bytes: int | Sequence[int] = 100,
    mass: np.ndarray | None = None,
    **side: Any,
) -> Steps:
    """Steps of these forwards; `mass` f32[N, 4], else every token counts 1 and is masked."""
    layers = np.array(num_experts, np.int64)
    sizes = np.broadcast_to(np.array(expert_bytes, np.int64), layers.shape).copy()
    step_forward, step_layer, offsets, expert, count, last = [], [], [0], [], [], []
    for number, forward in enumerate(forwards):
        for layer, active in sorted(forward.layers.items()):
            step_forward.append(number)
            step_layer.append(layer)
            mention = {e: turn for turn, e in enumerate(active)}
            for e in sorted(active):
                expert.append(e)
                count.append(active[e])
                last.append(mention[e])
            offsets.append(len(expert))
    tokens = [_tokens(f, top_k) if f.tokens is None else f.tokens for f in forwards]
    counts = np.array(count, np.int32)
    if mass is None:
        mass = np.repeat(counts[:, None].astype(np.float32), 4, axis=1)
    ints: Callable[[Any], np.ndarray] = lambda x: np.array(x, np.int64)  # noqa: E731
    return Steps(
        request=ints([f.request for f in forwards]),
        phase=ints([f.phase for f in forwards]),
        block=ints([f.block for f in forwards]),
        step=ints([f.step for f in forwards]),
        tokens=ints(tokens),
        context=np.zeros(len(forwards), np.int64),
        accepted=ints([f.produced for f in forwards]),
        produced=ints([f.produced for f in forwards]),
        source=np.arange(len(forwards)),
        step_offsets=np.searchsorted(step_forward, np.arange(len(forwards) + 1)).astype(np.int64),
        forward=ints(step_forward),
        layer=ints(step_layer),
        offsets=ints(offsets),
        expert=np.array(expert, np.uint16),
        count=counts,
        mass=np.ascontiguousarray(mass, np.float32),
        last_token=np.array(last, np.int32),
        num_experts=layers,
        expert_bytes=sizes,
        top_k=top_k,
        **side,
    )


def _tokens(forward: Forward, top_k: int) -> int:
    """The fewest tokens that such routing needs."""
    needs = [max(max(a.values()), -(-sum(a.values()) // top_k)) for a in forward.layers.values()]
    return max(needs, default=1)


def one_a_step(accesses: Sequence[int], experts: int, **fields: Any) -> Steps:
    """One expert a step, a step a forward: the streams that cache simulators replay."""
    return make_steps([Forward({0: {e: 1}}) for e in accesses], [experts], **fields)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Nanoseconds; a group of n experts over t tokens takes t0 + t*per_token + n*per_expert."""

    head: int = 0
    dense: int = 10
    group_t0: int = 5
    group_per_token: int = 0
    group_per_expert: int = 2
    cpu_call: int = 4
    cpu_expert: int = 20
    cpu_per_token: int = 1
    act_out: int = 3
    act_back: int = 2
    copy: int = 30
    copy_wake: int = 7
    copy_out: int = 25
    cpu_contention_ppm: int = 1_000_000
    link_contention_ppm: int = 1_000_000
    policy: int = 0
    draft: int = 0  # the draft expert, in draft forwards

    def tables(self, steps: Steps) -> CostTables:
        """Look-up tables, one class of layers for each expert size, in proportion to it."""
        sizes, layer_class = np.unique(steps.expert_bytes, return_inverse=True)
        most = int(steps.tokens.max())
        t = np.arange(most + 1)
        n = np.arange(int(steps.num_experts.max()) + 1)
        scale = sizes / sizes[0]
        group = self.group_t0 + self.group_per_token * t[:, None] + self.group_per_expert * n[None]
        gpu = np.rint(scale[:, None, None] * np.where(n > 0, group, 0)).astype(np.int64)
        cpu = np.rint(scale[:, None] * (self.cpu_expert + self.cpu_per_token * t)).astype(np.int64)
        crossing = np.where(t > 0, 1, 0)
        forwards = np.ones(steps.num_forwards, np.int64)
        return CostTables(
            head_ns=forwards * self.head,
            dense_ns=forwards * self.dense,
            dense_kernel_ns=forwards * self.dense,
            gpu_ns=gpu,
            gpu_kernel_ns=gpu,
            gpu_bound_ns=gpu,
            cpu_ns=cpu,
            cpu_call_ns=self.cpu_call,
            act_out_ns=(crossing * self.act_out).astype(np.int64),
            act_back_ns=(crossing * self.act_back).astype(np.int64),
            copy_ns=np.rint(scale * self.copy).astype(np.int64),
            copy_wake_ns=self.copy_wake,
            copy_out_ns=np.rint(scale * self.copy_out).astype(np.int64),
            cpu_contention_ppm=self.cpu_contention_ppm,
            link_contention_ppm=self.link_contention_ppm,
            policy_ns=self.policy,
            draft_ns=np.full((len(sizes), most + 1), self.draft, dtype=np.int64),
            opens=np.ones(steps.num_layers, dtype=np.int64),
            layer_class=layer_class.astype(np.int64),
            expert_bytes=steps.expert_bytes,
            labels=(),
            provenance={},
        )


def compose(
    admission: Admission | str = "compete",
    retention: Retention | None = None,
    dispatch: Dispatch | None = None,
    prefetch: Prefetch | None = None,
    allocation: Allocation | None = None,
    **fields: Any,
) -> Composition:
    """A policy of parts; LRU, all transferred, no prefetch unless said otherwise."""
    if isinstance(admission, str):
        admission = Admission[admission.upper()]
    return Composition(
        name="test",
        description="",
        source="",
        retention=retention or Lru(),
        allocation=allocation or Allocation(),
        dispatch=dispatch or Dispatch(),
        prefetch=prefetch or Prefetch(),
        admission=admission,
        **fields,
    )


def replay(
    steps: Steps,
    policy: Composition,
    machine: Machine = Machine(),
    calibration: Calibration | None = None,
    **fields: Any,
) -> Replay:
    """One configuration, with its plan log and a timeline of everything."""
    fields = {"plans": True, "timeline": (0, steps.num_forwards), **fields}
    settings = Settings(**fields)
    costs = machine.tables(steps)
    budget = parse_slots(settings.slots, settings.scope, steps.num_experts, costs.expert_bytes)
    return replay_steps(steps, costs, policy, budget, settings, calibration)


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted:
    """A part whose functions are plain Python and whose decisions a test wrote down."""


@dataclasses.dataclass(frozen=True, eq=False)
class OnCpu(Scripted, Dispatch):
    """Misses named in `experts` {(step, expert)} run on the CPU; `ranks` order the transfers."""

    experts: frozenset[tuple[int, int]] = frozenset()
    ranks: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    residents: frozenset[tuple[int, int]] = frozenset()  # that run on the CPU all the same

    def dispatch(self, step, cache, costs, plan, memory, params) -> None:
        for i, expert in enumerate(step.expert.tolist()):
            if plan.state[i] == ABSENT:
                plan.place[i] = ON_CPU if (step.index, expert) in self.experts else TRANSFER
                plan.rank[i] = self.ranks.get((step.index, expert), 0.0)
            elif (step.index, expert) in self.residents:
                plan.place[i] = ON_CPU


@dataclasses.dataclass(frozen=True)
class Ask:
    """One prefetch asked for."""

    layer: int
    expert: int
    due: int
    kind: int = 0
    chunks: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Asks(Scripted, Prefetch):
    """Prefetches by the layer-step that asks for them; steps in `anew` drop what still waits."""

    script: Mapping[int, Sequence[Ask]] = dataclasses.field(default_factory=dict)
    anew: frozenset[int] = frozenset()

    needs: ClassVar[frozenset[str]] = frozenset()

    def ask(self, step, cache, costs, plan, side, queue, memory, params) -> None:
        if step.index in self.anew:
            queue.begin = queue.end = 0
        for ask in self.script.get(step.index, ()):
            end = queue.end
            queue.layer[end], queue.expert[end], queue.kind[end] = ask.layer, ask.expert, ask.kind
            queue.due[end], queue.chunks[end] = ask.due, ask.chunks
            queue.end += 1


def state_of(plans: np.ndarray) -> np.ndarray:
    """`Plan.state` of a plan log."""
    return plans & 3


def place_of(plans: np.ndarray) -> np.ndarray:
    return plans >> 2 & 3


def stays_of(plans: np.ndarray) -> np.ndarray:
    return plans >> 4 & 1


def entries(outcome: Replay, but: Sequence[int] = (9, 10, 12)) -> list[tuple[int, ...]]:
    """(kind, begin, end, forward, layer, item) of the timeline, counters and uses left out."""
    lanes = outcome.lanes
    rows = lanes.log[: lanes.entries].tolist()
    return [tuple(row) for row in rows if row[0] not in but]
