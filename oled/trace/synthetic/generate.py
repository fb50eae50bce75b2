"""Traces of a made-up model: a generative process of routing, not a recording.

The process of a feasibility study, fitted to the published figures of LLaDA2.0-mini; it shows that
they are attainable together, not that real routing looks like this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from oled.trace.manifest import Manifest
from oled.trace.memory import trace_of_records
from oled.trace.schema import ConfidenceKind, ForwardRecord, Geometry, WeightKind
from oled.trace.steps import Steps, build_steps
from oled.trace.synthetic.model import Model
from oled.trace.synthetic.process import Process
from oled.trace.synthetic.requests import Workload, forwards_of
from oled.trace.tables import Trace
from oled.trace.writer import TraceWriter


def llada2_mini() -> Geometry:
    """Return the shape of LLaDA2.0-mini (bf16 experts of 6 MiB)."""
    return Geometry(
        moe_layers=tuple(range(1, 20)),
        experts_per_layer=(256,) * 19,
        top_k=8,
        expert_bytes=(3 * 2048 * 512 * 2,) * 19,
        num_layers=20,
        shared_experts=1,
        hidden_size=2048,
        moe_intermediate_size=512,
        name="llada2-mini",
    )


def synthetic(
    geometry: Geometry,
    workload: Workload,
    process: Process = Process(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    model_seed: int = 0,
) -> Iterator[ForwardRecord]:
    """Yield forwards of made-up requests, one at a time.

    `model_seed` makes the model (projections, popularity), `seed` the requests: two traces of one
    model serve as calibration and evaluation.
    """
    model = Model(geometry, process, np.random.default_rng(model_seed))
    pass_id = 0
    for request in range(workload.requests):
        rng = np.random.default_rng([seed, 1, request])
        for record in forwards_of(model, workload, request, pass_id, rng):
            yield record
            pass_id = record.pass_id + 1


def synthetic_manifest(
    geometry: Geometry, workload: Workload, process: Process, *, seed: int, model_seed: int
) -> Manifest:
    """Say what `trace.json` says about a synthetic trace."""
    return Manifest(
        geometry=geometry,
        weight_kind=WeightKind.SCALED_SUM,
        weight_sum=process.weight_sum,
        confidence_kind=(
            ConfidenceKind.CHOSEN_PROBABILITY
            if workload.decoding is None
            else ConfidenceKind.MAX_PROBABILITY
        ),
        model={"id": "synthetic", "revision": str(model_seed), "dtype": "float32"},
        decode=_settings(workload),
        seed=seed,
        provenance={"kind": "synthetic", "process": asdict(process), "workload": asdict(workload)},
    )


def _settings(workload: Workload) -> dict[str, Any]:
    if workload.decoding is None:
        return {"mode": "autoregressive"}
    settings = {"mode": "block_diffusion", "block_length": workload.block_length}
    return settings | asdict(workload.decoding)


def write_synthetic(
    path: str | Path,
    geometry: Geometry,
    workload: Workload,
    process: Process = Process(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    model_seed: int = 0,
) -> None:
    """Write a synthetic trace folder, streamed."""
    manifest = synthetic_manifest(geometry, workload, process, seed=seed, model_seed=model_seed)
    with TraceWriter(path, manifest) as writer:
        for record in synthetic(geometry, workload, process, seed=seed, model_seed=model_seed):
            writer.append(record)


def synthetic_trace(
    geometry: Geometry,
    workload: Workload,
    process: Process = Process(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    model_seed: int = 0,
) -> Trace:
    """Make a synthetic trace in memory, without a folder."""
    manifest = synthetic_manifest(geometry, workload, process, seed=seed, model_seed=model_seed)
    records = synthetic(geometry, workload, process, seed=seed, model_seed=model_seed)
    return trace_of_records(manifest, records)


def synthetic_steps(
    geometry: Geometry,
    workload: Workload,
    process: Process = Process(),  # noqa: B008 (frozen)
    **seeds: int,
) -> Steps:
    """Return the steps of `synthetic_trace`, for benchmarks."""
    return build_steps(synthetic_trace(geometry, workload, process, **seeds))
