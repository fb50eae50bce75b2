"""Small traces written by hand or by a seeded random generator, for tests of any part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oled.trace import (
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Manifest,
    Phase,
    TokenState,
    Trace,
    TraceWriter,
    WeightKind,
)
from oled.trace.files import file_sha256

MASKED, DECODED, PROMPT, PAD = TokenState


def geometry(
    experts: int | Sequence[int] = 8, *, layers: int = 3, top_k: int = 2, **more: Any
) -> Geometry:
    """Layer 0 dense, MoE layers from 1 on; experts of 1000 bytes in layer 1, 1001 in layer 2, …"""
    counts = (experts,) * layers if isinstance(experts, int) else tuple(experts)
    return Geometry(
        moe_layers=tuple(range(1, len(counts) + 1)),
        experts_per_layer=counts,
        top_k=top_k,
        expert_bytes=tuple(1000 + place for place in range(len(counts))),
        num_layers=len(counts) + 1,
        **more,
    )


def manifest(shape: Geometry, **changes: Any) -> Manifest:
    """Weights sum to 1, confidences are maximal probabilities, unless changed."""
    return replace(Manifest(shape, WeightKind.SUM_ONE, ConfidenceKind.MAX_PROBABILITY), **changes)


def record(ids: Any, weights: Any = None, **changes: Any) -> ForwardRecord:
    """One decode forward of request 0 with these ids [Lr, T, k]; equal weights unless given."""
    ids = np.array(ids)
    layers, tokens, top_k = ids.shape
    if weights is None:
        weights = np.full(ids.shape, 1 / top_k)
    fields: dict[str, Any] = {
        "request": 0,
        "pass_id": 0,
        "phase": Phase.DECODE,
        "layers": np.arange(1, layers + 1),
        "expert_ids": ids,
        "weights": np.array(weights),
        "positions": np.arange(tokens),
        "token_ids": np.arange(tokens) + 100,
        "confidence": np.full(tokens, 0.5),
        "state": np.full(tokens, DECODED),
        "accepted": np.zeros(tokens, dtype=np.uint8),
    }
    return ForwardRecord(**{**fields, **changes})


def routes(rng: np.random.Generator, shape: Geometry, tokens: int) -> tuple[Any, Any]:
    """Random ids without repetition and weights that sum to 1: [L, T, k] each."""
    ids = np.stack(
        [
            rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, : shape.top_k]
            for experts in shape.experts_per_layer
        ]
    )
    weights = rng.random(ids.shape) + 0.1
    return ids, weights / weights.sum(axis=2, keepdims=True)


def diffusion(
    shape: Geometry,
    *,
    requests: int = 2,
    blocks: int = 2,
    block_length: int = 4,
    prompt: int = 4,
    seed: int = 0,
    interleaved: bool = False,
) -> list[ForwardRecord]:
    """Block-diffusion requests with random routes: prefill, denoise (1 or 2 a step), commit.

    `interleaved` decodes all requests in one batch: they take turns, and rows end at different
    steps.
    """
    rng = np.random.default_rng(seed)
    decoded = [_request(rng, shape, r, blocks, block_length, prompt) for r in range(requests)]
    if not interleaved:
        flat = [one for records in decoded for one in records]
        return [replace(one, pass_id=place) for place, one in enumerate(flat)]
    longest = max(len(records) for records in decoded)
    return [
        replace(records[place], pass_id=place)
        for place in range(longest)
        for records in decoded
        if place < len(records)
    ]


def _request(
    rng: np.random.Generator, shape: Geometry, request: int, blocks: int, length: int, prompt: int
) -> list[ForwardRecord]:
    ids, weights = routes(rng, shape, prompt)
    records = [
        record(
            ids,
            weights,
            request=request,
            phase=Phase.PREFILL,
            state=np.full(prompt, PROMPT),
            confidence=np.full(prompt, np.nan),
        )
    ]
    for block in range(blocks):
        state = np.full(length, MASKED)
        step = 0
        while True:
            masked = np.flatnonzero(state == MASKED)
            chosen = rng.permutation(masked)[: rng.integers(1, 3)]
            accepted = np.zeros(length, dtype=np.uint8)
            accepted[chosen] = 1
            ids, weights = routes(rng, shape, length)
            records.append(
                record(
                    ids,
                    weights,
                    request=request,
                    phase=Phase.DENOISE if len(masked) else Phase.COMMIT,
                    block=block,
                    step=step if len(masked) else -1,
                    positions=prompt + block * length + np.arange(length),
                    context=prompt + block * length,
                    confidence=rng.random(length),
                    state=state.copy(),
                    accepted=accepted,
                    produced=len(chosen),
                )
            )
            if not len(masked):
                break
            state[chosen] = DECODED
            step += 1
    return records


def write(path: Path, about: Manifest, records: Iterable[ForwardRecord], **options: Any) -> Path:
    """Write a trace folder and name it."""
    with TraceWriter(path, about, **options) as writer:
        for one in records:
            writer.append(one)
    return path


def edit_table(folder: Path, file: str, change: Any, *, checksum: bool = True) -> None:
    """Rewrite a part: `change` gets its columns as Python lists in a dict and edits them.

    The manifest follows (rows and checksum) unless told not to.
    """
    table = pq.read_table(folder / file)
    columns = table.to_pydict()
    change(columns)
    arrays = [pa.array(columns[field.name], field.type) for field in table.schema]
    pq.write_table(pa.table(arrays, schema=table.schema), folder / file)

    def follow(data: dict[str, Any]) -> None:
        for part in data["parts"]:
            if part["file"] == file:
                part["rows"] = len(arrays[0])
                part["sha256"] = file_sha256(folder / file)

    if checksum:
        edit_manifest(folder, follow)


def edit_manifest(folder: Path, change: Any) -> None:
    """Let `change` edit the JSON object of the manifest."""
    data = json.loads((folder / "trace.json").read_text())
    change(data)
    (folder / "trace.json").write_text(json.dumps(data))


def assert_holds(trace: Trace, records: list[ForwardRecord]) -> None:
    """Every value of the records is in the trace, where it belongs."""
    forwards, tokens, routing = trace.forwards, trace.tokens, trace.routing
    assert trace.num_forwards == len(records)
    row = 0
    for number, one in enumerate(records):
        assert forwards.request[number] == one.request
        assert forwards.pass_id[number] == one.pass_id
        assert forwards.phase[number] == one.phase
        assert forwards.block[number] == one.block
        assert forwards.step[number] == one.step
        assert forwards.tokens[number] == len(one.positions)
        assert forwards.context[number] == one.context
        assert forwards.accepted[number] == one.accepted.sum()
        assert forwards.produced[number] == one.produced
        assert forwards.measured_ns[number] == one.measured_ns
        here = slice(forwards.token_offsets[number], forwards.token_offsets[number + 1])
        np.testing.assert_array_equal(tokens.position[here], one.positions)
        np.testing.assert_array_equal(tokens.token_id[here], one.token_ids)
        np.testing.assert_array_equal(tokens.confidence[here], one.confidence.astype(np.float32))
        np.testing.assert_array_equal(tokens.state[here], one.state)
        np.testing.assert_array_equal(tokens.accepted[here], one.accepted)
        mask = one.row_mask()
        layer, token = np.nonzero(mask)
        rows = slice(row, row + len(layer))
        row += len(layer)
        np.testing.assert_array_equal(routing.forward[rows], number)
        np.testing.assert_array_equal(routing.layer[rows], one.layers[layer])
        np.testing.assert_array_equal(routing.token[rows], token)
        expected = one.expert_ids[mask].astype(np.int64) % 65536  # -1 is NO_EXPERT
        np.testing.assert_array_equal(routing.expert_ids[rows], expected)
        np.testing.assert_array_equal(routing.weights[rows], one.weights[mask].astype(np.float32))
    assert row == len(routing.forward)
