"""Decode prompts with a model whose experts are offloaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from oled.errors import UserError
from oled.hardware import CostTables, Profile, Runtime, build_costs
from oled.live.backends.kinds import EMULATED, Kind
from oled.live.decider import Decider
from oled.live.executor import Executor, device_slots, refuse_unsupported
from oled.live.experts import common_form, move_the_rest, numbers_of, size_of_the_rest, take_experts
from oled.live.foresight import Foresight
from oled.live.gates import Gates
from oled.live.given import difference
from oled.live.hooks import Offloaded
from oled.live.kernels import Ints
from oled.live.planlog import LinkLog, PlanLog
from oled.live.steplog import StepLog, empty_steps
from oled.live.store import Preflight
from oled.live.timeline import live_timeline
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition
from oled.policies.part import NEEDS
from oled.record.decode import Autoregressive, Decoding, Pass
from oled.record.loading import LoadedModel
from oled.record.modules import geometry_of, moe_layers
from oled.record.prompts import Prompt, tokenize
from oled.sim import metrics
from oled.sim.calibration import Calibration
from oled.sim.lanes import LOG_DENSE
from oled.sim.prepare import Replay, assemble, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import Budget, parse_slots
from oled.sim.timeline import Timeline, write_events
from oled.trace.schema import Geometry, Phase
from oled.trace.steps import Steps

_ROOM_TO_WORK = 512 * 2**20  # on the device: KV cache, activations, workspaces; assumed
_RATES = ("hit_rate", "hit_rate_tokens", "accesses", "hits", "transfers", "cpu_executions")
HORIZONS = 3
"""Layers ahead whose gates are asked where a policy needs predictions; HybriMoE looks at three."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What jobs cost where time is kept."""

    profile: Profile
    runtime: Runtime
    geometry: ModelGeometry | None = None  # cost.geometry
    paced: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LiveRun:
    """What decoding gave."""

    texts: tuple[str, ...]
    passes: tuple[Pass, ...]
    steps: Steps  # its routing, as the simulator replays it
    plans: PlanLog
    link: LinkLog
    foresight: Foresight  # what a prefetcher saw
    budget: Budget
    costs: CostTables
    forward_ns: NDArray[np.int64]  # [F] wall
    decide_ns: NDArray[np.int64]  # [F] wall, from a layer's ids on
    preflight: Preflight
    entries: NDArray[np.int64]  # timeline
    layers: tuple[int, ...]  # absolute ids
    rates: dict[str, float | int | None]  # hit_rate, transfers, ... as in metrics.json

    @property
    def tpot_ns(self) -> float | None:
        rows = {int(request): 1 for request in np.unique(self.steps.request)}
        return metrics.tpot_ns(self.forward_ns, self.steps, rows)

    def summary(self) -> dict[str, Any]:
        """Flat figures; times are wall times of this machine."""
        forwards = len(self.passes)
        return {
            "forwards": forwards,
            "layer_steps": self.steps.num_steps,
            "tokens": int(self.steps.produced.sum()),
            "tpot_ns": self.tpot_ns,
            "decide_ns_per_forward": float(np.median(self.decide_ns)),
            "store_bytes": self.preflight.store,
            "device_bytes": self.preflight.device,
            **{name: self.rates[name] for name in _RATES},
        }

    def lines(self) -> list[str]:
        """The same in words."""
        found = self.summary()
        tpot = "-" if self.tpot_ns is None else f"{self.tpot_ns / 1e6:.2f} ms"
        return [
            f"{found['tokens']} tokens in {found['forwards']} forwards, TPOT {tpot} (wall, this "
            f"machine); deciding {found['decide_ns_per_forward'] / 1e3:.0f} us a forward",
            f"hit rate {found['hit_rate'] or 0:.1%}, {found['transfers']} transfers, "
            f"{found['cpu_executions']} on the CPU",
        ]

    def write_timeline(self, file: Path, name: str, simulated: Replay) -> Path:
        """Both sides in one file that Perfetto opens."""
        there = Timeline.of(simulated.lanes, self.layers, name)
        here = live_timeline(self.entries, self.layers, name)
        return write_events(file, [*there.events(1), *here.events(2)])


def live_run(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    decode: Decoding,
    composition: Composition,
    settings: Settings,
    machine: Machine,
    calibration: Calibration | None = None,
    kind: Kind = EMULATED,
) -> LiveRun:
    """Decode the prompts, one after the other, under a policy.

    The model, which is on the CPU, goes where the backend computes; its experts move into the host
    store and stay there as its parameters.
    """
    refuse_unsupported(composition, settings)
    if settings.batch_size > 1:
        raise UserError(
            f"workload.batch_size={settings.batch_size}: a model decodes live one prompt at a "
            f"time, for what padding routes is nobody's; a trace runs in lockstep (trace=DIR)"
        )
    _refuse_what_is_missing(composition, decode, calibration)
    layers = moe_layers(loaded.model)
    form, numbers = common_form(layers), numbers_of(layers, kind.numbers)
    geometry = geometry_of(loaded.model)
    known = empty_steps(geometry)
    decoding = decode.resolve(loaded.model, loaded.tokenizer)
    requests = tokenize(prompts, loaded.tokenizer)
    most = max(len(request.prompt) for request in requests) + decoding.max_new_tokens
    costs = _costs(geometry, known, most, machine, settings)
    budget = parse_slots(settings.slots, settings.scope, known.num_experts, costs.expert_bytes)
    ready = assemble(known, costs, composition, budget, settings, calibration)
    pooled_bytes = budget.total_bytes if ready.rules.pooled else 0
    slots = device_slots(
        ready.start.capacity, pooled_bytes, costs.expert_bytes, settings.staging_slots
    )
    row = form.size * numbers.bytes
    experts = int(known.num_experts.sum()) * row
    preflight = kind.preflight(
        experts,
        slots * row,
        building=int(known.num_experts.max()) * row,
        replaced=experts,
        beside=size_of_the_rest(loaded.model, layers) + _ROOM_TO_WORK,
    )
    preflight.check()
    store = take_experts(layers)
    move_the_rest(loaded.model, layers, kind.device)
    backend = kind.make(store, slots, ready.costs, machine.paced)
    executor = Executor(store, slots, Decider(ready), backend)
    gates = Gates(
        loaded.model,
        layers,
        scores="scores" in composition.needs,
        horizons=HORIZONS if "predictions" in composition.needs else 0,
    )
    foresight = Foresight(len(layers), gates.horizons, ready.side.store, settings.seed)
    log = StepLog(known.num_experts, known.top_k, foresight)
    passes: list[Pass] = []
    times: list[int] = []
    texts = []
    with Offloaded(layers, executor, log, gates) as live:
        for request in tqdm(requests, unit="prompt", disable=None):
            before, first = time.perf_counter_ns(), len(passes)
            for done in decoding.decode(loaded.model, [request], live.announce):
                live.finish(done)
                passes.append(done)
                times.append(time.perf_counter_ns() - before)
                before = time.perf_counter_ns()
            tokens = output_tokens(passes[first:])
            texts.append(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
    return LiveRun(
        texts=tuple(texts),
        passes=tuple(passes),
        steps=log.steps(known.expert_bytes),
        plans=executor.decider.log(),
        link=executor.decider.link_log(),
        foresight=foresight,
        budget=budget,
        costs=costs,
        forward_ns=np.array(times, np.int64),
        decide_ns=np.array(executor.decide_ns, np.int64),
        preflight=preflight,
        entries=np.array(backend.entries, np.int64).reshape(-1, 6),
        layers=geometry.moe_layers,
        rates=metrics.count_metrics(executor.decider.tally.by_phase),
    )


def _refuse_what_is_missing(
    composition: Composition, decode: Decoding, calibration: Calibration | None
) -> None:
    """What the policy needs and a decoding that goes on can not give it."""
    unknown = {"future"}
    if isinstance(decode, Autoregressive):
        unknown |= {"blocks", "stages"}
    if calibration is None:
        unknown.add("calibration")
    missing = sorted(composition.needs & unknown)
    if missing:
        raise UserError(
            f"policy '{composition.name}' needs {', '.join(NEEDS[n] for n in missing)}; a live "
            f"decoding has none"
        )


def output_tokens(passes: Sequence[Pass]) -> list[int]:
    """What one prompt's passes delivered, in order, up to and including the end token."""
    written: dict[int, int] = {}
    delivered = 0
    for done in passes:
        written |= dict(done.shares[0].written)
        delivered += done.shares[0].produced
    if passes[0].phase is Phase.PREFILL and passes[0].shares[0].written:
        delivered += 1  # the token that a prefill decides is not `produced`
    return [written[position] for position in sorted(written)][:delivered]


def _costs(
    geometry: Geometry, known: Steps, most_tokens: int, machine: Machine, settings: Settings
) -> CostTables:
    return build_costs(
        geometry,
        known.tokens,
        known.context,
        most_tokens,
        machine.profile,
        machine.runtime,
        machine.geometry,
        kernel=settings.cpu_kernel,
        pinned=settings.pinned,
    )


def simulate_run(
    run: LiveRun,
    composition: Composition,
    settings: Settings,
    calibration: Calibration | None = None,
) -> tuple[Replay, str | None]:
    """The simulation of the routing that the run made, between dense parts as long as the run's,
    and where its decisions part from the run's.
    """
    steps = run.steps
    dense_ns, head_ns = _outside_experts(run.entries, steps)
    costs = replace(run.costs, head_ns=head_ns, dense_ns=dense_ns)
    asked = replace(settings, plans=True, timeline=(0, steps.num_forwards))
    known = (steps, costs, composition, run.budget, asked, calibration)
    replay = replay_steps(*known)
    simulated = PlanLog(replay.tally.plans, replay.tally.orders)
    ready = assemble(*known)
    parted = difference(run.plans, run.link, steps, simulated, ready, run.foresight.side)
    return replay, parted


def _outside_experts(entries: Ints, steps: Steps) -> tuple[Ints, Ints]:
    """Of each forward, the time before each layer's experts (the median of all but the first
    layer), and what passes before the next one beyond that; i64[F] each, from a live timeline.
    """
    dense = entries[entries[:, 0] == LOG_DENSE]
    lasted = dense[:, 2] - dense[:, 1]
    forwards = range(steps.num_forwards)
    later = [lasted[(dense[:, 3] == f) & (dense[:, 4] > 0)] for f in forwards]
    first = np.array([lasted[(dense[:, 3] == f) & (dense[:, 4] == 0)].sum() for f in forwards])
    each = np.array([np.median(own) if own.size else 0 for own in later]).astype(np.int64)
    after = np.append(np.maximum(first - each, 0)[1:], 0)
    return each, after.astype(np.int64)
