"""`simulate`: a trace under a policy on a machine, in one call; the CLI is a thin shell over it."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from oled.errors import UserError
from oled.hardware import CostTables, Profile, Runtime, build_costs, load_profile, load_runtime
from oled.models.catalogue import model_geometry
from oled.policies.composition import Composition, load_composition
from oled.policies.part import INSTEAD, NEEDS
from oled.policies.retention.belady import BeladyFromTheStart
from oled.sim import metrics as m
from oled.sim.calibration import Calibration
from oled.sim.drafted import beside_plain
from oled.sim.prepared import PreparedTrace
from oled.sim.references import references
from oled.sim.result import Result
from oled.sim.settings import Settings
from oled.sim.slots import Budget, parse_slots
from oled.sim.timeline import Timeline
from oled.trace import Trace
from oled.trace.steps import Steps

BUNDLED_CALIBRATION = "calibration"
"""The bundled trace that learning parts use when the bundled trace `demo` is replayed."""


def simulate(
    trace: PreparedTrace | Trace | str | Path = "demo",
    policy: str | Path | Mapping[str, Any] | Composition = "oled_priority",
    *,
    hardware: str | Path | Mapping[str, Any] | Profile = "rtx5090_xeon8470q",
    runtime: str | Path | Mapping[str, Any] | Runtime = "graph_fused",
    calibration: PreparedTrace | Trace | str | Path | None = None,
    settings: Settings | None = None,
    **fields: Any,
) -> Result:
    """Replay `trace` under `policy`; `fields` are those of `Settings` (slots=40, scope="layer").

    Raises UserError (one line) for whatever the user can mend: unknown names, a cache below the
    minimum, a policy whose columns the trace lacks.
    """
    began = time.perf_counter()
    settings = dataclasses.replace(settings or Settings(), **fields)
    composition = load_composition(policy)
    settings, runtime, released = as_released(composition, settings, runtime)
    subject = PreparedTrace.of(trace)
    if settings.confidence == "own":
        subject = subject.knowing_its_own()
    if "drafts" in composition.needs & subject.lacks:  # a better word than 'no such predictor'
        refuse_what_is_missing(subject, composition)
    if composition.predictor is not None:
        subject = subject.predicting(composition.predictor)
    refuse_what_is_missing(subject, composition)
    learned, learned_from = calibrate(subject, composition, calibration)
    recorded = subject
    if composition.reroute is not None:
        subject = subject.rerouted(composition.reroute)
    rows = rows_of_groups(subject.steps, settings.batch_size)
    subject, recorded = (s.batched(settings.batch_size) for s in (subject, recorded))
    profile = hardware if isinstance(hardware, Profile) else load_profile(hardware)
    preset = runtime if isinstance(runtime, Runtime) else load_runtime(runtime)
    costs = _costs(subject, profile, preset, settings)
    scope = composition.scope or settings.scope
    steps = subject.steps
    budget = parse_slots(settings.slots, settings.scope, steps.num_experts, costs.expert_bytes)
    replay = subject.replay(costs, composition, budget, settings, learned)
    forward_ns = replay.tally.end_ns - replay.tally.begin_ns

    result: dict[str, Any] = {
        **m.latency_metrics(forward_ns, steps, rows),
        "decode_h2d_bytes_per_token": m.bytes_per_token(replay.tally.by_phase, steps),
        **m.headline(replay.tally.by_phase),
        **m.bootstrap(replay.tally.by_phase, forward_ns, steps, rows, settings.seed),
    }
    if settings.references:
        result.update(_reference_times(subject, recorded, costs, rows))
        if "order" not in subject.lacks:
            alike = Alike(composition.initial, learned)
            result.update(_oracle_metrics(subject, costs, budget, settings, rows, alike))
    if subject.change is not None:
        result.update(subject.change.metrics())
    if subject.drafts is not None:
        result.update(subject.drafts.metrics())
        if settings.references:
            plain_costs = _costs(subject.undrafted(), profile, preset, settings)
            result.update(
                beside_plain(
                    subject, plain_costs, composition, budget, settings, learned, forward_ns
                )
            )
    drafting = subject.geometry.draft_experts * int(costs.expert_bytes.sum())
    result["gpu_bytes_total"] = _gpu_bytes(budget, costs, settings, scope) + drafting
    result["initial_residents"] = replay.initial_residents
    result["wall_s"] = time.perf_counter() - began
    result["phases"] = m.phase_metrics(
        lambda phase: m.count_metrics(replay.tally.by_phase[:, phase]), forward_ns, steps
    )
    result["provenance"] = {
        "trace": subject.name,
        "trace_hash": subject.hash,
        "policy": composition.name,
        "policy_source": composition.source,
        "calibration": learned_from,
        "settings": {**dataclasses.asdict(settings), "scope": scope},
        "hardware": profile.name,
        "runtime": preset.name,
        "costs": dict(costs.provenance),
        "labels": [*costs.labels, *subject.labels, *_label_of(composition), *released],
        "versions": _versions(),
    }
    columns = ("accesses", "hits", "transfers", "cpu_executions", "slots", "steps", "time_ns")
    per_layer = {name: replay.tally.by_layer[:, j].copy() for j, name in enumerate(columns)}
    timeline = None
    if settings.timeline is not None:
        timeline = Timeline.of(replay.lanes, subject.geometry.moe_layers, composition.name)
    per_request = m.request_times(forward_ns, steps)
    return Result(result, per_layer, per_request, forward_ns, timeline, replay)


def _label_of(composition: Composition) -> tuple[str, ...]:
    if not composition.dispatch.drops:
        return ()
    return (
        "misses may be approximated (dropped_gate_share): cost only, the text would change; "
        "bound_relaxed does not hold for it, since it counts the dropped work",
    )


def as_released(
    composition: Composition, settings: Settings, runtime: str | Path | Mapping[str, Any] | Runtime
) -> tuple[Settings, str | Path | Mapping[str, Any] | Runtime, list[str]]:
    """Return the settings and the runtime of a system that has its own, and a label for each."""
    own = {
        "cpu_kernel": composition.cpu_kernel,
        "pinned": composition.pinned,
    }
    changed: dict[str, Any] = {key: value for key, value in own.items() if value is not None}
    labels = [f"as released: cost.{key}={str(value).lower()}" for key, value in changed.items()]
    if composition.runtime is not None:
        runtime = composition.runtime
        labels.append(f"as released: runtime={runtime}")
    return dataclasses.replace(settings, **changed), runtime, labels


def refuse_what_is_missing(subject: PreparedTrace, composition: Composition) -> None:
    missing = sorted(composition.needs & subject.lacks)
    if missing:
        # the remedy of one lack helps only where the lacks named before it in INSTEAD are none
        hint = next((f": {INSTEAD[need]}" for need in INSTEAD if need in missing), "")
        raise UserError(
            f"policy '{composition.name}' needs {', '.join(NEEDS[n] for n in missing)}; "
            f"trace '{subject.name}' has none{hint}"
        )


def calibrate(
    subject: PreparedTrace,
    composition: Composition,
    source: PreparedTrace | Trace | str | Path | None,
) -> tuple[Calibration | None, str | None]:
    """What the composition learns, and from which trace; never from the evaluated one."""
    if "calibration" not in composition.needs:
        return None, None
    if source is None and subject.name == "demo":
        source = BUNDLED_CALIBRATION
    if source is None:
        raise UserError(
            f"policy '{composition.name}' learns from a calibration trace: "
            "give one with calibration=NAME|DIR, recorded on other prompts"
        )
    other = PreparedTrace.of(source)
    if other.hash == subject.hash:
        raise UserError(
            f"policy '{composition.name}' would learn from the trace that it is judged on: "
            "give another one with calibration=NAME|DIR"
        )
    if not np.array_equal(other.steps.num_experts, subject.steps.num_experts):
        raise UserError(
            f"calibration trace '{other.name}' has other layers or experts than '{subject.name}'"
        )
    if composition.reroute is not None:
        other = other.rerouted(composition.reroute)
    return Calibration.from_steps(other.steps), other.name


def rows_of_groups(steps: Steps, batch_size: int) -> dict[int, int]:
    """Rows in each group of `batch(steps, batch_size)`; the last may be smaller."""
    requests = np.unique(steps.request)
    if batch_size == 1:
        return {int(request): 1 for request in requests}
    groups = -(-requests.size // batch_size)
    return {g: min(batch_size, requests.size - g * batch_size) for g in range(groups)}


def _costs(
    subject: PreparedTrace, profile: Profile, runtime: Runtime, settings: Settings
) -> CostTables:
    steps = subject.steps
    return build_costs(
        subject.geometry,
        steps.tokens,
        steps.context,
        int(steps.tokens.max(initial=1)),
        profile,
        runtime,
        None if settings.geometry is None else model_geometry(settings.geometry),
        kernel=settings.cpu_kernel,
        pinned=settings.pinned,
        rows=steps.rows,
    )


def _reference_times(
    subject: PreparedTrace, recorded: PreparedTrace, costs: CostTables, rows: Mapping[int, int]
) -> dict[str, float | None]:
    """Return the TPOT of the references without a policy.

    `ideal` is of the routes as recorded, the same for every policy; where a rule has changed them
    `ideal_own` is of the changed ones, and so are the bounds.
    """
    steps = subject.steps
    times = references(steps, costs)
    found = {
        "ideal_tpot_ns": m.tpot_ns(times.ideal_ns, steps, rows),
        "all_resident_tpot_ns": m.tpot_ns(times.all_resident_ns, steps, rows),
        "bound_relaxed_tpot_ns": m.tpot_ns(times.bound_relaxed_ns, steps, rows),
    }
    if recorded is not subject:
        common = references(recorded.steps, costs).ideal_ns
        found["ideal_own_tpot_ns"] = found["ideal_tpot_ns"]
        found["ideal_tpot_ns"] = m.tpot_ns(common, recorded.steps, rows)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Alike:
    """What an oracle begins with: the residents of the policy that it stands beside."""

    initial: str
    learned: Calibration | None

    @property
    def key(self) -> str:
        return self.initial if self.learned is None else f"{self.initial} {id(self.learned)}"


def _oracle_metrics(
    subject: PreparedTrace,
    costs: CostTables,
    budget: Budget,
    settings: Settings,
    rows: Mapping[int, int],
    alike: Alike,
) -> dict[str, float | None]:
    """Return the replays of Belady with bypass (uniform, pooled), which begin with the policy's own
    residents, and of a GPU without any resident expert; remembered with the trace."""
    given = (budget.capacity.tolist(), budget.total_bytes, settings, costs.provenance, alike.key)
    key = repr(given)
    if key in subject.memo:
        return subject.memo[key]
    staging = settings.staging if settings.unbounded else max(1, settings.staging_slots)
    plain = dataclasses.replace(settings, staging=staging, timeline=None, plans=False)
    empty = Budget(np.zeros_like(budget.capacity), 0)
    found: dict[str, float | None] = {}
    for name, policy, room, initial in (
        ("ref_belady_uniform", "oracle", budget, alike.initial),
        ("ref_belady_pooled", "oracle_pooled", budget, alike.initial),
        ("no_cache", "inter_iteration", empty, "empty"),
    ):
        oracle = load_composition(policy)
        if initial != "empty":
            oracle = dataclasses.replace(oracle, initial=initial, retention=BeladyFromTheStart())
        replay = subject.replay(costs, oracle, room, plain, alike.learned)
        forward_ns = replay.tally.end_ns - replay.tally.begin_ns
        found[f"{name}_tpot_ns"] = m.tpot_ns(forward_ns, subject.steps, rows)
        if room is budget:
            found[f"{name}_hit_rate"] = m.headline(replay.tally.by_phase)["hit_rate"]
    subject.memo[key] = found
    return found


def _gpu_bytes(budget: Budget, costs: CostTables, settings: Settings, scope: str) -> int:
    """GPU memory of the experts: resident slots and staging slots (each of the largest expert)."""
    layers = int((budget.capacity * costs.expert_bytes).sum())
    resident = budget.total_bytes if scope == "global" else layers
    return resident + settings.staging_slots * int(costs.expert_bytes.max())


def _versions() -> dict[str, str]:
    names = ("oled", "numpy", "numba", "pyarrow")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
