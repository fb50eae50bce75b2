"""Steps and next use against plain Python (G03, G07, G15)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import MASKED, PAD, PROMPT, diffusion, geometry, manifest, record, routes

from oled.trace import (
    CONF_MASKED,
    CONF_OPENED,
    GATE,
    GATE_MASKED,
    NEVER,
    NO_EXPERT,
    ForwardRecord,
    Geometry,
    Steps,
    TraceError,
    WeightKind,
    build_steps,
    next_use,
    trace_of_records,
)
from tests.support.seeds import sized

SHAPE = geometry()

Entry = dict[int, dict[str, Any]]


def expected_steps(shape: Geometry, records: list[ForwardRecord]) -> list[tuple[int, int, Entry]]:
    """(forward, dense layer, entries) of every step, the slow and obvious way."""
    result = []
    for number, one in enumerate(sorted(records, key=lambda one: one.request)):
        for place, layer in enumerate(one.layers):
            dense = shape.moe_layers.index(int(layer))
            tokens = range(len(one.positions))
            if one.row_tokens is not None:
                tokens = [int(t) for t in one.row_tokens[place]]
                if not tokens:
                    continue
            entries: Entry = defaultdict(lambda: {"count": 0, "mass": np.zeros(4), "last": -1})
            for t in tokens:
                if one.state[t] == PAD:
                    continue
                ids = [int(e) for e in one.expert_ids[place, t]]
                weights = [float(np.float32(w)) for w in one.weights[place, t]]
                total = sum(w for e, w in zip(ids, weights, strict=True) if e != NO_EXPERT)
                c = float(np.float32(one.confidence[t]))
                c = 1.0 if np.isnan(c) else c
                for slot, (e, w) in enumerate(zip(ids, weights, strict=True)):
                    if e == NO_EXPERT or e >= shape.experts_per_layer[dense]:
                        continue
                    g = w / total
                    entry = entries[e]
                    entry["count"] += 1
                    entry["last"] = t * shape.top_k + slot
                    entry["mass"][GATE] += g
                    if one.state[t] == MASKED:
                        entry["mass"][GATE_MASKED] += g
                        entry["mass"][CONF_MASKED] += c * g
                    else:
                        entry["mass"][CONF_OPENED] += c * g
            result.append((number, dense, dict(entries)))
    return result


def assert_steps(steps: Steps, expected: list[tuple[int, int, Entry]]) -> None:
    assert steps.num_steps == len(expected)
    for s, (forward, layer, entries) in enumerate(expected):
        assert (steps.forward[s], steps.layer[s]) == (forward, layer)
        assert steps.step_offsets[forward] <= s < steps.step_offsets[forward + 1]
        here = slice(steps.offsets[s], steps.offsets[s + 1])
        assert steps.expert[here].tolist() == sorted(entries)
        for i, e in enumerate(sorted(entries), steps.offsets[s]):
            assert steps.count[i] == entries[e]["count"]
            assert steps.last_token[i] == entries[e]["last"]
            np.testing.assert_allclose(steps.mass[i], entries[e]["mass"], rtol=1e-6, atol=1e-7)


@settings(max_examples=sized(30))
@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.lists(st.integers(2, 12), min_size=1, max_size=4),
    interleaved=st.booleans(),
    holes=st.booleans(),
)
def test_steps_are_those_of_plain_python(seed, experts, interleaved, holes) -> None:
    shape = geometry(experts, zero_experts=1)
    rng = np.random.default_rng(seed)
    records = []
    for one in diffusion(shape, requests=3, blocks=1, seed=seed, interleaved=interleaved):
        ids, state = one.expert_ids.copy(), one.state.copy()
        ids[rng.random(ids.shape) < 0.1] = NO_EXPERT
        if holes:  # the zero expert of the first layer, pads, and rows that are missing
            ids[0, 0, 0] = experts[0]
            state[rng.random(len(state)) < 0.2] = PAD
            rows = tuple(np.flatnonzero(rng.random(len(state)) < 0.8) for _ in experts)
            one = replace(one, row_tokens=rows)
        records.append(replace(one, expert_ids=ids, state=state))
    steps = build_steps(trace_of_records(manifest(shape), records))
    assert_steps(steps, expected_steps(shape, records))


def test_forwards_are_sorted_by_request() -> None:
    records = diffusion(SHAPE, requests=3, interleaved=True)
    steps = build_steps(trace_of_records(manifest(SHAPE), records))
    order = sorted(range(len(records)), key=lambda number: records[number].request)
    assert steps.source.tolist() == order
    for name, field in (("request", "request"), ("block", "block"), ("context", "context")):
        assert getattr(steps, name).tolist() == [getattr(records[n], field) for n in order]
    assert steps.tokens.tolist() == [len(records[n].positions) for n in order]


def test_without_weights_every_expert_of_a_token_counts_the_same() -> None:
    one = record(np.array([[[1, 2], [2, 3]]]), np.zeros((1, 2, 2)))
    shape = geometry(layers=1)
    about = manifest(shape, weight_kind=WeightKind.NONE)
    steps = build_steps(trace_of_records(about, [one]))
    assert steps.mass[:, GATE].tolist() == [0.5, 1.0, 0.5]


def test_unknown_confidence_counts_as_one() -> None:
    states = np.array([MASKED, PROMPT])
    one = record([[[1, 2], [1, 2]]], state=states, confidence=np.full(2, np.nan))
    steps = build_steps(trace_of_records(manifest(geometry(layers=1)), [one]))
    np.testing.assert_allclose(steps.mass, [[1, 0.5, 0.5, 0.5]] * 2)


def test_g03_pads_take_no_part() -> None:
    ids, weights = routes(np.random.default_rng(0), SHAPE, 8)
    state = np.where(np.arange(8) < 5, PAD, PROMPT)
    steps = build_steps(trace_of_records(manifest(SHAPE), [record(ids, weights, state=state)]))
    assert steps.tokens.tolist() == [3]
    assert steps.count.sum() == 3 * 3 * 2


def test_g07_zero_experts_take_part_but_cost_nothing() -> None:
    shape = geometry(layers=1, zero_experts=2)
    one = record([[[3, 9], [8, 9], [3, 4]]], [[[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]])
    steps = build_steps(trace_of_records(manifest(shape), [one]))
    assert steps.expert.tolist() == [3, 4]
    assert steps.count.tolist() == [2, 1]
    assert steps.mass[:, GATE].tolist() == [0.75, 0.5]  # the zero expert keeps its share
    assert steps.num_experts.tolist() == [8]


@pytest.mark.parametrize("bad", [8, 65534])
def test_g07_an_impossible_id_is_refused_with_its_place(bad: int) -> None:
    ids = np.array([[[1, 2]], [[1, 2]], [[1, bad]]])
    with pytest.raises(TraceError) as error:
        build_steps(trace_of_records(manifest(SHAPE), [record(ids)]))
    for word in ("row 2", "layer 3", "token 0", f"expert id {bad}", "8 experts"):
        assert word in str(error.value)


def test_g15_layers_keep_their_own_sizes() -> None:
    shape = geometry([8, 6, 4])
    trace = trace_of_records(manifest(shape), diffusion(shape))
    steps = build_steps(trace)
    assert steps.num_experts.tolist() == [8, 6, 4]
    assert steps.expert_bytes.tolist() == [1000, 1001, 1002]
    for layer, experts in enumerate((8, 6, 4)):
        here = np.repeat(steps.layer == layer, np.diff(steps.offsets))
        assert steps.expert[here].max() == experts - 1


def test_rows_out_of_order_or_twice_are_refused() -> None:
    trace = trace_of_records(manifest(SHAPE), diffusion(SHAPE))
    trace.routing.token[[0, 1]] = 1, 0
    with pytest.raises(TraceError, match=r"routing row 1 \(forward 0, layer 1, token 0\)"):
        build_steps(trace)
    trace.routing.token[[0, 1]] = 0, 0
    with pytest.raises(TraceError, match="routing row 1"):
        build_steps(trace)


# --- next use -------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_next_use_is_the_next_use(persistent: bool) -> None:
    shape = geometry([8, 12])
    steps = build_steps(trace_of_records(manifest(shape), diffusion(shape, requests=3)))
    found = next_use(steps, persistent)
    for s in range(steps.num_steps):
        for i in range(steps.offsets[s], steps.offsets[s + 1]):
            expected = next(
                (
                    later
                    for later in range(s + 1, steps.num_steps)
                    if steps.layer[later] == steps.layer[s]
                    and steps.expert[i]
                    in steps.expert[steps.offsets[later] : steps.offsets[later + 1]]
                    and (
                        persistent
                        or steps.request[steps.forward[later]] == steps.request[steps.forward[s]]
                    )
                ),
                NEVER,
            )
            assert found[i] == expected


# --- the same without JIT -------------------------------------------------------------------------

DIGEST = """
import hashlib, json, sys
sys.path.insert(0, {tests!r})
from small import diffusion, geometry, manifest
from oled.trace import batch, build_steps, next_use, trace_of_records
from oled.trace.stats import locality
from oled.trace.synthetic import Workload, synthetic_trace
shape = geometry([8, 6, 16])
digest = hashlib.sha256()
made = synthetic_trace(geometry(16, layers=2), Workload(requests=1, blocks=1, block_length=4))
for trace in (trace_of_records(manifest(shape), diffusion(shape, requests=3)), made):
    digest.update(json.dumps(locality(trace).to_json()).encode())
    for steps in (build_steps(trace), batch(build_steps(trace), 2)):
        for array in (steps.offsets, steps.expert, steps.count, steps.mass, steps.last_token):
            digest.update(array.tobytes())
        digest.update(next_use(steps, False).tobytes())
print(digest.hexdigest())
"""


def test_the_same_bytes_without_jit() -> None:
    code = DIGEST.format(tests=str(Path(__file__).parent))
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NUMBA_DISABLE_JIT": off},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for off in ("0", "1")
    }
    assert len(digests) == 1


def test_sentinel_is_not_an_expert() -> None:
    steps = build_steps(
        trace_of_records(manifest(geometry(layers=1)), [record([[[5, -1]]], [[[1.0, 0.0]]])])
    )
    assert steps.expert.tolist() == [5]
    assert NO_EXPERT not in steps.expert
