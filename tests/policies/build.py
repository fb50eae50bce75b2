"""Steps, caches and what else a part is shown, small and written by hand."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.policies.interface import (
    At,
    Cache,
    Costs,
    Plan,
    Queue,
    Side,
    Step,
)
from oled.policies.kernel import Kernel, Memory
from oled.policies.part import Part
from oled.trace.schema import Phase


def make_step(
    expert: Sequence[int],
    *,
    layer: int = 0,
    clock: int = 1,
    count: Sequence[int] | None = None,
    gate: Sequence[float] | None = None,
    gate_masked: Sequence[float] | None = None,
    conf_masked: Sequence[float] | None = None,
    conf_opened: Sequence[float] | None = None,
    next_use: Sequence[int] = (),
    scores: Sequence[float] = (),
    coming: Sequence[float] = (),
    phase: Phase = Phase.DENOISE,
    forward: int = 0,
    block: int = 0,
    denoising_step: int = 0,
    tokens: int = 16,
) -> Step:
    """A layer-step with active experts `expert` (ascending); by default a token and mass 1 each."""
    active = len(expert)
    columns = (gate or [1.0] * active, gate_masked, conf_masked, conf_opened)
    mass = [column or [0.0] * active for column in columns]
    return Step(
        index=clock - 1,
        forward=forward,
        layer=layer,
        phase=int(phase),
        block=block,
        denoising_step=denoising_step,
        tokens=tokens,
        clock=clock,
        expert=np.array(expert, np.uint16),
        count=np.array(count or [1] * active, np.int32),
        mass=np.ascontiguousarray(np.array(mass, np.float32).reshape(4, active).T),
        last_token=np.arange(active, dtype=np.int32),
        next_use=np.array(next_use, np.int64),
        scores=np.array(scores, np.float32),
        coming=np.array(coming, np.float32),
    )


def make_at(
    *,
    forward: int = 0,
    phase: Phase = Phase.DENOISE,
    block: int = 0,
    denoising_step: int = 0,
    first_of_request: bool = False,
) -> At:
    return At(forward, int(phase), block, denoising_step, first_of_request)


def make_cache(
    *,
    layers: int = 1,
    experts: int = 8,
    slots: int | Sequence[int] = 4,
    resident: Mapping[int, Sequence[int]] | None = None,
    num_experts: Sequence[int] | None = None,
    expert_bytes: Sequence[int] | None = None,
    prior: NDArray[np.float64] | None = None,
) -> Cache:
    """A cache at the start of a request: `resident[layer]` are ids; scores are the prior."""
    shape = (layers, experts)
    bytes_of = np.array(expert_bytes or [1] * layers, np.int64)
    capacity = np.array([slots] * layers if isinstance(slots, int) else slots, np.int64)
    residents = np.zeros(shape, np.uint8)
    for layer, ids in (resident or {}).items():
        residents[layer, list(ids)] = 1
    used = residents.sum(axis=1).astype(np.int64)
    popularity = np.zeros(shape) if prior is None else np.array(prior, np.float64)
    scratch = 2 * max(layers, experts)
    return Cache(
        resident=residents,
        score=popularity.copy(),
        stamp=np.tile(-1 - np.arange(experts), (layers, 1)),
        staged=np.zeros(shape, np.uint8),
        fresh=np.zeros(shape, np.uint8),
        capacity=capacity,
        used=used,
        resident_bytes=int(used @ bytes_of),
        budget_bytes=int(capacity @ bytes_of),
        staged_experts=0,
        num_experts=np.array(num_experts or [experts] * layers, np.int64),
        expert_bytes=bytes_of,
        prior=popularity,
        key=np.zeros(scratch),
        age=np.zeros(scratch, np.int64),
        item=np.zeros(scratch, np.int64),
    )


def make_costs(
    *,
    layers: int = 1,
    gpu_ns: NDArray[np.int64] | int = 10,
    cpu_ns: Sequence[int] | int = 100,
    copy_ns: int = 100,
    act_ns: int = 0,
    copy_wake_ns: int = 0,
    cpu_call_ns: int = 0,
    cpu_contention_ppm: int = 1_000_000,
    link_contention_ppm: int = 1_000_000,
    top_k: int = 2,
    most_tokens: int = 64,
    most_experts: int = 64,
) -> Costs:
    """One class of layers. `cpu_ns` by tokens from 0 on, or the same for any number of them."""
    if isinstance(gpu_ns, int):
        gpu_ns = np.full((1, most_tokens + 1, most_experts + 1), gpu_ns, np.int64)
        gpu_ns[:, :, 0] = 0
    cpu = [0] + [cpu_ns] * most_tokens if isinstance(cpu_ns, int) else cpu_ns
    activations = np.full(most_tokens + 1, act_ns, np.int64)
    return Costs(
        layer_class=np.zeros(layers, np.int64),
        gpu_ns=gpu_ns,
        cpu_ns=np.array([cpu], np.int64),
        copy_ns=np.array([copy_ns], np.int64),
        copy_out_ns=np.array([copy_ns], np.int64),
        act_out_ns=activations,
        act_back_ns=activations.copy(),
        copy_wake_ns=copy_wake_ns,
        cpu_call_ns=cpu_call_ns,
        policy_ns=0,
        cpu_contention_ppm=cpu_contention_ppm,
        link_contention_ppm=link_contention_ppm,
        top_k=top_k,
    )


def make_plan(*, layers: int = 1, experts: int = 8) -> Plan:
    return Plan(
        state=np.zeros(experts, np.uint8),
        place=np.zeros(experts, np.uint8),
        rank=np.zeros(experts),
        stays=np.zeros(experts, np.uint8),
        order=np.zeros(experts, np.int64),
        evicted=np.zeros(layers * experts, np.int64),
        index=np.zeros(experts, np.int64),
        transfers=0,
        evictions=0,
        evicted_active=0,
        on_cpu=0,
        late=0,
    )


def make_queue(room: int = 64) -> Queue:
    columns: list[Any] = [np.zeros(room, np.int64) for _ in range(5)]
    return Queue(*columns, begin=0, end=0)


def make_side(steps: Sequence[Step] = (), *, layers: int = 1, experts: int = 8) -> Side:
    """The routing of `steps`; no predictions, an empty store."""
    routed = [step.expert for step in steps]
    empty = np.zeros(0, np.int64)
    return Side(
        offsets=np.cumsum([0] + [len(ids) for ids in routed]).astype(np.int64),
        expert=np.concatenate(routed) if routed else np.zeros(0, np.uint16),
        layer=np.array([step.layer for step in steps], np.int64),
        forward=np.array([step.forward for step in steps], np.int64),
        forward_request=np.zeros(1 + max((s.forward for s in steps), default=0), np.int64),
        pred_offsets=empty,
        pred_expert=np.zeros(0, np.uint16),
        pred_score=np.zeros(0, np.float32),
        horizons=0,
        store=np.zeros((0, layers, experts)),
        seed=0,
    )


def memory_of(part: Part, cache: Cache) -> Memory:
    """The part's empty memory for this cache."""
    return part.memory(*cache.resident.shape)


def in_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without machine code: a kernel, compiled or plain, and all that it calls.

    What is marked `jitable` is plain Python already.
    """
    plain = getattr(function, "function", getattr(function, "py_func", function))
    names = {name: plain.__globals__.get(name) for name in plain.__code__.co_names}
    called = {name: in_python(f) for name, f in names.items() if hasattr(f, "py_func")}
    return types.FunctionType(plain.__code__, {**plain.__globals__, **called})


def call(kernel: Kernel, *args: Any) -> None:
    """Call a kernel in Python on `args` and compiled on copies: both must leave the same."""
    twins = copy.deepcopy(args)
    in_python(kernel)(*args)
    kernel.compiled(*twins[-2:])(*twins)
    for arg, twin in zip(args, twins, strict=True):
        for name, ours in arg._asdict().items():
            np.testing.assert_array_equal(ours, getattr(twin, name))
