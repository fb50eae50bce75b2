"""`oled bench`: how fast the simulator is on this machine. One process, one core, JSON of figures.

The routing is drawn, not recorded: LLaDA2.0-mini's shape with a stated active set and overlap, so
that figures of different versions compare. Times are CPU time of this thread, best of several.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.hardware import build_costs, load_profile, load_runtime
from oled.models.catalogue import model_geometry
from oled.policies.composition import Composition, load_composition
from oled.policies.part import Retention
from oled.sim import metrics
from oled.sim.decisions import decision_loop
from oled.sim.prepare import assemble, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import parse_slots
from oled.trace import ForwardRecord, Geometry, Phase, Steps, TraceWriter
from oled.trace.synthetic import Process, Workload, llada2_mini, synthetic_manifest

MODEL = "llada2_mini"
TOP_K = 8
ACTIVE = 88
OVERLAP = 0.885
PAPER_DECIDE_NS = (3_690_000, 6_030_000)
"""Policy overhead per forward that arXiv 2609.33385 reports (its way of counting is unknown)."""


class PlainLru(Retention):
    """LRU whose (empty) observe is plain Python: makes the driver run step by step in Python."""

    def observe(self, *_: Any) -> None:
        pass


def drawn_steps(forwards: int, tokens: int, active: int = ACTIVE, seed: int = 0) -> Steps:
    """Denoising forwards of LLaDA2.0-mini's shape: `active` experts a layer-step, of which the
    share OVERLAP stays from one forward to the next; `tokens` x TOP_K routed pairs a layer-step."""
    model = model_geometry(MODEL)
    layers, experts = len(model.moe_layers), model.num_experts
    rng = np.random.default_rng(seed)
    leaving = round((1 - OVERLAP) * active)
    sets = np.empty((forwards, layers, active), np.int64)
    order = np.argsort(rng.random((layers, experts)), axis=1)
    for forward in range(forwards):
        sets[forward] = order[:, :active]
        keys = rng.random((layers, experts))
        kept, rest = order[:, :active], order[:, active:]
        kept = np.take_along_axis(kept, np.argsort(keys[:, :active], axis=1), axis=1)
        rest = np.take_along_axis(rest, np.argsort(keys[:, active:], axis=1), axis=1)
        order = np.concatenate(
            [kept[:, leaving:], rest[:, :leaving], kept[:, :leaving], rest[:, leaving:]], axis=1
        )
    sets.sort(axis=2)
    steps, entries = forwards * layers, forwards * layers * active
    extra = rng.integers(active, size=(steps, tokens * TOP_K - active))
    count = np.ones((steps, active), np.int32)
    np.add.at(count, (np.arange(steps)[:, None], extra), 1)
    gate = rng.random((entries, 1), dtype=np.float32) * count.reshape(-1, 1)
    mass = np.concatenate([gate, gate * 0.4, gate * 0.3, gate * 0.6], axis=1).astype(np.float32)
    one = np.ones(forwards, np.int64)
    return Steps(
        request=np.zeros(forwards, np.int64),
        phase=one * int(Phase.DENOISE),
        block=np.arange(forwards) // 8,
        step=np.arange(forwards) % 8,
        tokens=one * tokens,
        context=one * 512,
        accepted=one * 2,
        produced=one * 2,
        source=np.arange(forwards),
        step_offsets=np.arange(forwards + 1) * layers,
        forward=np.repeat(np.arange(forwards), layers),
        layer=np.tile(np.arange(layers), forwards),
        offsets=np.arange(steps + 1) * active,
        expert=sets.reshape(-1).astype(np.uint16),
        count=count.reshape(-1),
        mass=np.ascontiguousarray(mass),
        last_token=np.argsort(rng.random((steps, active)), axis=1).reshape(-1).astype(np.int32),
        num_experts=np.full(layers, experts, np.int64),
        expert_bytes=np.full(layers, model.expert_bytes, np.int64),
        top_k=TOP_K,
    )


def _best(times: int, run: Callable[[], Any]) -> tuple[float, Any]:
    """(least seconds of thread CPU time, last result)."""
    best, result = float("inf"), None
    for _ in range(times):
        began = time.thread_time()
        result = run()
        best = min(best, time.thread_time() - began)
    return best, result


def sim(forwards: int = 1000) -> dict[str, Any]:
    """Layer-steps a second of whole replays with full lanes, 40 slots."""
    steps = drawn_steps(forwards, tokens=16)
    costs = build_costs(
        llada2_mini(), steps.tokens, steps.context, 16,
        load_profile("rtx5090_xeon8470q"), load_runtime("graph_fused"),
    )  # fmt: skip
    settings = Settings(slots=40)
    budget = parse_slots(40, "layer", steps.num_experts, steps.expert_bytes)
    figures: dict[str, Any] = {
        "shape": f"{MODEL}, {ACTIVE} active experts, overlap {OVERLAP}, 16 tokens, 40 slots",
        "layer_steps": steps.num_steps,
    }

    def replay(composition: Composition, subject: Steps = steps) -> Any:
        return replay_steps(subject, costs, composition, budget, settings)

    began = time.perf_counter()
    replay(load_composition("inter_iteration"))
    figures["first_call_s"] = time.perf_counter() - began  # compiles, or loads from the disk cache
    for name in ("inter_iteration", "oled"):
        composition = load_composition(name)
        replay(composition)
        seconds, done = _best(3, lambda c=composition: replay(c))  # type: ignore[misc]
        rate = steps.num_steps / seconds
        simulated = float((done.tally.end_ns - done.tally.begin_ns).sum()) / 1e9
        figures[f"{name}_layer_steps_per_s"] = round(rate)
        figures[f"{name}_routing_entries_per_s"] = round(rate * 16 * TOP_K)
        figures[f"{name}_real_time_factor"] = round(simulated / seconds)
        figures[f"{name}_hit_rate"] = metrics.count_metrics(done.tally.by_phase)["hit_rate"]
    figures["routing_entries_per_s"] = figures["oled_routing_entries_per_s"]
    figures["real_time_factor"] = figures["oled_real_time_factor"]
    short = drawn_steps(max(1, forwards // 20), tokens=16)
    short_costs = dataclasses.replace(
        costs,
        **{
            name: getattr(costs, name)[: short.num_forwards]
            for name in ("head_ns", "dense_ns", "dense_kernel_ns")
        },
    )
    python = dataclasses.replace(load_composition("inter_iteration"), retention=PlainLru())
    seconds, _ = _best(2, lambda: replay_steps(short, short_costs, python, budget, settings))
    figures["python_layer_steps_per_s"] = round(short.num_steps / seconds)
    figures["libcachesim_lru_requests_per_s"] = _libcachesim(steps)
    return figures


def _libcachesim(steps: Steps) -> float | str:
    """libCacheSim's LRU (no clock) on the same accesses, where it is installed."""
    if importlib.util.find_spec("libcachesim") is None:
        return "not installed"
    import libcachesim as lcs

    entry_layer = np.repeat(steps.layer, np.diff(steps.offsets))
    objects = entry_layer * 256 + steps.expert
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.oracleGeneral"
        rows = np.zeros(
            objects.size, np.dtype([("t", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
        )
        rows["id"], rows["size"], rows["next"] = objects + 1, 1, -1
        file.write_bytes(rows.tobytes())
        best = float("inf")
        for _ in range(3):
            reader = lcs.TraceReader(str(file), lcs.TraceType.ORACLE_GENERAL_TRACE)
            cache = lcs.LRU(40 * steps.num_layers)
            began = time.thread_time()
            cache.process_trace(reader)
            best = min(best, time.thread_time() - began)
    return round(objects.size / best)


def decide(forwards: int = 400) -> dict[str, Any]:
    """Time of the decisions alone for one forward: 19 layers, block 32, 70 active experts."""
    steps = drawn_steps(forwards, tokens=32, active=70)
    costs = build_costs(
        llada2_mini(), steps.tokens, steps.context, 32,
        load_profile("rtx5090_xeon8470q"), load_runtime("graph_fused"),
    )  # fmt: skip
    budget = parse_slots(40, "layer", steps.num_experts, steps.expert_bytes)
    figures: dict[str, Any] = {"shape": f"{MODEL}, 19 layers, 32 tokens, 70 active, 40 slots"}
    for name in ("inter_iteration", "oled"):
        ready = assemble(steps, costs, load_composition(name), budget, Settings(slots=40))
        loop = decision_loop(ready)
        loop()
        seconds, _ = _best(3, loop)
        figures[f"{name}_decide_ns_per_forward"] = round(1e9 * seconds / forwards)
    figures["decide_ns_per_forward"] = figures["oled_decide_ns_per_forward"]
    figures["paper_decide_ns_per_forward"] = list(PAPER_DECIDE_NS)
    return figures


_LOAD = """
import json, resource, sys, time
from oled.trace import build_steps, load
began = time.perf_counter()
trace = load(sys.argv[1])
loaded = time.perf_counter()
steps = build_steps(trace)
built = time.perf_counter()
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"rows": len(trace.routing.forward), "load_s": loaded - began,
                  "steps_s": built - loaded, "peak_rss_bytes": rss}))
"""


def load(rows: int = 2_000_000) -> dict[str, Any]:
    """Wall time and peak memory of a new process that loads `rows` rows and builds steps."""
    tokens = 16
    geometry = llada2_mini()
    layers, experts = len(geometry.moe_layers), geometry.experts_per_layer[0]
    forwards = -(-rows // (tokens * layers))
    rng = np.random.default_rng(0)
    manifest = synthetic_manifest(geometry, Workload(), Process(), seed=0, model_seed=0)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        with TraceWriter(trace, manifest) as writer:
            for forward in range(forwards):
                keys = rng.random((layers, tokens, experts), dtype=np.float32)
                writer.append(_record(forward, geometry, np.argpartition(keys, TOP_K)[..., :TOP_K]))
        command = [sys.executable, "-c", _LOAD, str(trace)]
        for _ in range(2):  # the first may compile
            done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def _record(forward: int, geometry: Geometry, ids: NDArray[np.int64]) -> ForwardRecord:
    """A denoising forward with even weights; ids i64[L, T, k]."""
    tokens = ids.shape[1]
    return ForwardRecord(
        request=0,
        pass_id=forward,
        phase=Phase.DENOISE,
        block=forward // 8,
        step=forward % 8,
        context=512,
        layers=np.array(geometry.moe_layers, np.uint16),
        expert_ids=ids.astype(np.uint16),
        weights=np.full(ids.shape, 1.0 / TOP_K, np.float32),
        positions=np.arange(512, 512 + tokens, dtype=np.uint32),
        token_ids=np.zeros(tokens, np.int32),
        confidence=np.full(tokens, 0.5, np.float32),
        state=np.zeros(tokens, np.uint8),
        accepted=(np.arange(tokens) < 2).astype(np.uint8),
        produced=2,
    )
