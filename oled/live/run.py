"""Decode prompts with a model whose experts are offloaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.hardware import CostTables, Profile, Runtime, build_costs
from oled.live.backends.kind import Kind
from oled.live.backends.kinds import EMULATED
from oled.live.decider import Decider
from oled.live.decoded import LiveRun
from oled.live.executor import Executor, device_slots, refuse_unsupported
from oled.live.experts import (
    common_form,
    file_experts,
    move_the_rest,
    numbers_of,
    size_of_the_rest,
    take_experts,
)
from oled.live.foresight import Foresight
from oled.live.gates import Gates, predictor_for
from oled.live.hooks import Offloaded
from oled.live.steplog import StepLog, empty_steps
from oled.live.store import Preflight, Store
from oled.live.surrogates import StandIns, Surrogates
from oled.models.catalogue import ModelGeometry
from oled.policies.composition import Composition
from oled.policies.part import NEEDS
from oled.running.decode import Autoregressive, Decoding, Pass, Request, Speculative
from oled.running.loading import LoadedModel
from oled.running.modules import MoeLayer, geometry_of, moe_layers
from oled.running.prompts import Prompt, tokenize
from oled.running.teacher_forcing import TeacherForcing, output_tokens
from oled.running.threads import threads_for
from oled.sim import metrics
from oled.sim.calibration import Calibration
from oled.sim.prepare import assemble
from oled.sim.settings import Settings
from oled.sim.slots import Budget, parse_slots
from oled.trace.schema import Geometry
from oled.trace.steps import Steps
from oled.types import Ints

_ROOM_TO_WORK = 512 * 2**20  # on the device: KV cache, activations, workspaces; assumed


@dataclass(frozen=True, slots=True)
class Machine:
    """What jobs cost where time is kept."""

    profile: Profile
    runtime: Runtime
    geometry: ModelGeometry | None = None  # cost.geometry
    paced: bool = False


def live_run(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    decode: Decoding | TeacherForcing,
    composition: Composition,
    settings: Settings,
    machine: Machine,
    calibration: Calibration | None = None,
    kind: Kind[Any] = EMULATED,
    heads: str | Path | None = None,
    *,
    stand_in: bool = True,
) -> LiveRun:
    """Decode the prompts, one after the other, under a policy.

    `heads`: a file of trained predictors and surrogates, or "bundled", for policies that follow one
    or give misses up. `stand_in` False: what is given up is not replaced at all (a control).

    The model, which is on the CPU, goes where the backend computes; its experts move into the host
    store and stay there as its parameters.
    """
    _refuse_what_cannot_run(composition, settings, decode, calibration, kind)
    layers = moe_layers(loaded.model)
    geometry = geometry_of(loaded.model)
    known = empty_steps(geometry)
    decoding = decode.resolve(loaded.model, loaded.tokenizer)
    requests = tokenize(prompts, loaded.tokenizer)
    most = max(len(request.prompt) for request in requests) + decoding.max_new_tokens
    costs = _costs(geometry, known, most, machine, settings)
    budget = parse_slots(settings.slots, settings.scope, known.num_experts, costs.expert_bytes)
    ready = assemble(known, costs, composition, budget, settings, calibration)
    slots = device_slots(ready, costs, budget, settings.staging_slots)
    surrogates = None
    if composition.dispatch.drops and stand_in:
        surrogates = _surrogates(composition, layers, heads, kind.device)
    beside = 0 if surrogates is None else surrogates.bytes
    preflight = _preflight(loaded.model, layers, slots, kind, beside)
    preflight.check()
    gates = Gates(
        loaded.model,
        layers,
        scores="scores" in composition.needs,
        predictor=predictor_for(composition, loaded.model, layers, heads, kind.device),
    )
    foresight = Foresight(len(layers), gates.horizons, ready.side.store, settings.seed)
    log = StepLog(known.num_experts, known.top_k, foresight)
    store = _stored(layers, kind)
    move_the_rest(loaded.model, layers, kind.device)
    backend = kind.make(store, slots, ready.costs, machine.paced)
    executor = Executor(store, slots, Decider(ready), backend)
    live = Offloaded(layers, executor, log, gates)
    stand_ins: AbstractContextManager[Any] = nullcontext()
    if surrogates is not None:
        stand_ins = StandIns(layers, surrogates, lambda: executor.approximated)
    with threads_for(loaded.model), live, stand_ins:
        texts, passes, times = _decode(loaded, decoding, requests, live)
    decoded = tuple(texts), tuple(passes), np.array(times, np.int64)
    return _result(decoded, live, (budget, costs, preflight, beside), geometry)


def _result(
    decoded: tuple[tuple[str, ...], tuple[Pass, ...], Ints],
    offloaded: Offloaded,
    planned: tuple[Budget, CostTables, Preflight, int],
    geometry: Geometry,
) -> LiveRun:
    """Collect what a decoding gave. `planned`: with the bytes of surrogates, as in `LiveRun`."""
    executor, log = offloaded.executor, offloaded.log
    texts, passes, forward_ns = decoded
    budget, costs, preflight, surrogate_bytes = planned
    return LiveRun(
        texts=texts,
        passes=passes,
        steps=log.steps(np.array(geometry.expert_bytes, np.int64)),
        plans=executor.decider.log(),
        link=executor.decider.link_log(),
        foresight=log.foresight,
        budget=budget,
        costs=costs,
        forward_ns=forward_ns,
        decide_ns=np.array(executor.decide_ns, np.int64),
        ask_ns=np.array(offloaded.ask_ns, np.int64),
        preflight=preflight,
        surrogate_bytes=surrogate_bytes,
        entries=np.array(executor.backend.entries, np.int64).reshape(-1, 6),
        layers=geometry.moe_layers,
        rates=metrics.headline(executor.decider.tally.by_phase),
    )


def _refuse_what_cannot_run(
    composition: Composition,
    settings: Settings,
    decode: Decoding | TeacherForcing,
    calibration: Calibration | None,
    kind: Kind[Any],
) -> None:
    """Raise UserError for what a model cannot run live, before anything is allocated."""
    refuse_unsupported(composition, settings)
    kind.refuse(composition)
    if settings.batch_size > 1:
        raise UserError(
            f"workload.batch_size={settings.batch_size}: a model decodes live one prompt at a "
            f"time, for what padding routes is nobody's; a trace runs in lockstep (trace=DIR)"
        )
    _refuse_what_is_missing(composition, decode, calibration)
    if composition.dispatch.drops and kind.expert_file is not None:
        raise UserError(
            f"policy '{composition.name}' approximates misses, and its text is compared with that "
            f"of the same model: take link=memory"
        )


def _stored(layers: Sequence[MoeLayer], kind: Kind[Any]) -> Store:
    """Move the model's experts to where the backend's link copies from."""
    file = kind.expert_file
    return take_experts(layers) if file is None else file_experts(layers, file)


def _decode(
    loaded: LoadedModel,
    decoding: Decoding | TeacherForcing,
    requests: Sequence[Request],
    live: Offloaded,
) -> tuple[list[str], list[Pass], list[int]]:
    """Texts of the requests, and passes with their wall times, ns."""
    texts: list[str] = []
    passes: list[Pass] = []
    times: list[int] = []
    for request in tqdm(requests, unit="prompt", disable=None):
        before, first = time.perf_counter_ns(), len(passes)
        for done in decoding.decode(loaded.model, [request], live.announce):
            live.finish(done)
            passes.append(done)
            times.append(time.perf_counter_ns() - before)
            before = time.perf_counter_ns()
        tokens = output_tokens(passes[first:])
        texts.append(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
    return texts, passes, times


def _surrogates(
    composition: Composition, layers: Sequence[MoeLayer], heads: str | Path | None, device: str
) -> Surrogates:
    if heads is None:
        raise UserError(
            f"policy '{composition.name}' approximates misses: give heads=FILE of "
            f"experiments/training/train_predictors.py (heads=bundled: the small model's)"
        )
    return Surrogates.load(heads, layers, device)


def _preflight(
    model: PreTrainedModel, layers: Sequence[MoeLayer], slots: int, kind: Kind[Any], beside: int
) -> Preflight:
    """The memory that the run needs: the store takes what the model gives back. `beside`: bytes
    that surrogates occupy on the device."""
    row = common_form(layers).size * numbers_of(layers, kind.numbers).bytes
    counts = [entry.num_experts for entry in layers]
    return kind.preflight(
        sum(counts) * row,
        slots * row,
        building=max(counts) * row,
        replaced=sum(counts) * row,
        beside=size_of_the_rest(model, layers) + _ROOM_TO_WORK + beside,
    )


def _refuse_what_is_missing(
    composition: Composition, decode: Decoding | TeacherForcing, calibration: Calibration | None
) -> None:
    """What the policy needs and a decoding that goes on can not give it."""
    if isinstance(decode, Speculative):
        raise UserError(
            "drafts are recorded and replayed, not run live: use decode=block_diffusion or "
            "decode=autoregressive"
        )
    unknown = {"future", "drafts"}
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
