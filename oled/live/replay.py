"""The routing of a trace run live: random or real weights, random inputs, every layer-step real.

Dense parts and heads take their nominal time and compute nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.hardware import CostTables
from oled.live.backends.kinds import EMULATED, Kind
from oled.live.decider import Decider
from oled.live.executor import Executor, device_slots, refuse_unsupported
from oled.live.given import forwards_of
from oled.live.kernels import SILU, ExpertForm, Floats
from oled.live.outputs import Outputs
from oled.live.planlog import LinkLog, PlanLog
from oled.live.store import HostStore
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition
from oled.sim.calibration import Calibration
from oled.sim.lanes import LOG_DENSE, LOG_HEAD
from oled.sim.prepare import assemble
from oled.sim.replay import step_of
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.trace import Trace, batch
from oled.trace.batch import lockstep
from oled.trace.schema import Geometry
from oled.trace.steps import Steps, rows_of_steps


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A trace's routing token by token, beside its steps. S layer-steps."""

    steps: Steps
    ids: tuple[NDArray[np.int32], ...]  # [S] of [T, k]
    weights: tuple[Floats, ...]  # [S] of [T, k]

    @classmethod
    def of(cls, trace: Trace, steps: Steps, first: int, forwards: int, rows: int = 1) -> Routing:
        """`forwards` forwards from `first` on, in replay order.

        `steps`: of the trace. `rows`: so many requests in lockstep; their tokens follow each other.
        """
        order = np.argsort(trace.forwards.request, kind="stable")
        begin, end, *_ = rows_of_steps(trace, order)
        table, ids, weights = trace.routing, [], []
        joined = batch(steps, rows)
        window = cut(joined, first, forwards)
        members = members_of(steps, joined, rows)
        lo = int(joined.step_offsets[first])
        for step in range(lo, lo + window.num_steps):
            spans = [slice(begin[s], end[s]) for s in members[step]]
            ids.append(np.concatenate([table.expert_ids[span] for span in spans]).astype(np.int32))
            weights.append(np.concatenate([table.weights[span] for span in spans]))
        return cls(window, tuple(ids), tuple(weights))


def members_of(steps: Steps, joined: Steps, rows: int) -> list[list[int]]:
    """The layer-steps of `steps` that each of `joined` (of `rows` requests in lockstep) is made of,
    those of the first request first.
    """
    if rows == 1:
        return [[step] for step in range(steps.num_steps)]
    found: list[list[int]] = []
    _, ends, members = lockstep(steps, rows)
    for forward, (lo, hi) in enumerate(itertools.pairwise(ends)):
        of_layer: dict[int, list[int]] = {}
        for member in members[lo:hi]:
            for step in range(steps.step_offsets[member], steps.step_offsets[member + 1]):
                of_layer.setdefault(int(steps.layer[step]), []).append(step)
        mine = slice(joined.step_offsets[forward], joined.step_offsets[forward + 1])
        found += [of_layer[int(layer)] for layer in joined.layer[mine]]
    return found


def cut(steps: Steps, first: int, forwards: int) -> Steps:
    """The steps of a window of forwards, numbered from 0."""
    last = min(first + forwards, steps.num_forwards)
    if not 0 <= first < last:
        raise UserError(
            f"forwards {first} to {first + forwards - 1}: the trace has {steps.num_forwards}"
        )
    step_lo, step_hi = int(steps.step_offsets[first]), int(steps.step_offsets[last])
    lo, hi = int(steps.offsets[step_lo]), int(steps.offsets[step_hi])
    window = Steps(
        request=steps.request[first:last],
        phase=steps.phase[first:last],
        block=steps.block[first:last],
        step=steps.step[first:last],
        tokens=steps.tokens[first:last],
        context=steps.context[first:last],
        accepted=steps.accepted[first:last],
        produced=steps.produced[first:last],
        source=steps.source[first:last],
        step_offsets=steps.step_offsets[first : last + 1] - step_lo,
        forward=steps.forward[step_lo:step_hi] - first,
        layer=steps.layer[step_lo:step_hi],
        offsets=steps.offsets[step_lo : step_hi + 1] - lo,
        expert=steps.expert[lo:hi],
        count=steps.count[lo:hi],
        mass=steps.mass[lo:hi],
        last_token=steps.last_token[lo:hi],
        num_experts=steps.num_experts,
        expert_bytes=steps.expert_bytes,
        top_k=steps.top_k,
        scores=None if steps.scores is None else steps.scores[step_lo:step_hi],
    )
    if steps.pred_offsets is None or steps.pred_expert is None or steps.pred_score is None:
        return window
    said = steps.pred_offsets[step_lo * steps.horizons : step_hi * steps.horizons + 1]
    return replace(
        window,
        pred_offsets=said - said[0],
        pred_expert=steps.pred_expert[said[0] : said[-1]],
        pred_score=steps.pred_score[said[0] : said[-1]],
        horizons=steps.horizons,
    )


def form_of(geometry: Geometry, model: ModelGeometry | None = None) -> ExpertForm:
    """The experts of a trace's geometry, or of `model`, as gated layers without biases."""
    shape = geometry if model is None else model
    if shape.hidden_size is None or shape.moe_intermediate_size is None:
        raise UserError("the trace does not say how wide its experts are: they can not be built")
    return ExpertForm(shape.hidden_size, shape.moe_intermediate_size, False, False, SILU, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LiveReplay:
    """What one live replay gave. F forwards, S layer-steps."""

    plans: PlanLog
    link: LinkLog
    outputs: Outputs
    begin_ns: NDArray[np.int64]  # [F] actual
    end_ns: NDArray[np.int64]  # [F]
    late_ns: NDArray[np.int64]  # [F] worst lateness of any lane against its own deadlines
    work_ns: NDArray[np.int64]  # [F, 4] nominal work given to GPU, H2D, D2H, CPU; experts only
    decide_ns: NDArray[np.int64]  # [F] wall time of deciding
    entries: NDArray[np.int64]  # timeline, as in oled.sim.timeline.Timeline


def live_replay(
    routing: Routing,
    store: HostStore,
    costs: CostTables,
    composition: Composition,
    budget: Budget,
    settings: Settings,
    calibration: Calibration | None = None,
    *,
    kind: Kind = EMULATED,
    paced: bool = True,
    inputs: Sequence[Floats] | None = None,
    keep_outputs: bool = True,
) -> LiveReplay:
    """Run `routing` on a backend; `inputs` f32[T, H] by layer-step, else random.

    Outputs are kept where they are computed until the run is over.
    """
    refuse_unsupported(composition, settings)
    steps = routing.steps
    ready = assemble(steps, costs, composition, budget, settings, calibration)
    slots = device_slots(ready, costs, budget, settings.staging_slots)
    kind.preflight(0, slots * store.expert_bytes).check()
    backend = kind.make(store, slots, ready.costs, paced)
    executor = Executor(store, slots, Decider(ready), backend)
    rng = np.random.default_rng(settings.seed)
    shape = (max(map(len, routing.ids)) + 64, store.form.hidden)
    bank = backend.adopt(rng.standard_normal(shape, dtype=np.float32))
    outputs: list[Any] = []
    times = np.zeros((3, steps.num_forwards), np.int64)
    work_ns = np.zeros((steps.num_forwards, 4), np.int64)
    work = ready.work
    prepared = []  # while no time counts
    for index, (forward, weight) in enumerate(zip(steps.forward, routing.weights, strict=True)):
        row = index % 64
        x = bank[row : row + len(weight)] if inputs is None else backend.adopt(inputs[index])
        prepared.append((step_of(work, index, int(forward)), backend.adopt(weight), x))
    with executor:
        for at, resets in forwards_of(work, ready.options.persistent):
            forward = at.forward
            if resets:
                executor.begin_request()
            times[0, forward] = backend.now
            executor.begin_forward(at)
            for index in range(work.step_offsets[forward], work.step_offsets[forward + 1]):
                step, weight, x = prepared[index]
                backend.host(LOG_DENSE, int(work.dense_ns[index]), forward, step.layer)
                out = executor.run(step, ready.side, routing.ids[index], weight, x)
                if keep_outputs:
                    outputs.append(out)
            backend.host(LOG_HEAD, int(work.head_ns[forward]), forward, -1)
            times[1, forward] = backend.now
            times[2, forward], work_ns[forward] = backend.take()
        read = Outputs([backend.read(out) for out in outputs])
    return LiveReplay(
        plans=executor.decider.log(),
        link=executor.decider.link_log(),
        outputs=read,
        begin_ns=times[0],
        end_ns=times[1],
        late_ns=times[2],
        work_ns=work_ns,
        decide_ns=np.array(executor.decide_ns, np.int64),
        entries=np.array(backend.entries, np.int64).reshape(-1, 6),
    )
