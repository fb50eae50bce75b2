"""A made-up block-diffusion model: a generative process of routing, not a recording.

The process of a feasibility study, fitted to the published figures of LLaDA2.0-mini; it shows that
they are attainable together, not that real routing looks like this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.trace.manifest import Manifest
from oled.trace.memory import trace_of_records
from oled.trace.schema import (
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Phase,
    Prediction,
    RouterScores,
    TokenState,
    WeightKind,
)
from oled.trace.steps import Steps, build_steps
from oled.trace.synthetic.process import Floats, Model, Process, Text
from oled.trace.tables import Trace
from oled.trace.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class Workload:
    """How many requests, how long, and decoded how."""

    requests: int = 4
    prompt_blocks: int = 4  # prompt tokens in blocks; one prefill forward
    blocks: int = 8
    block_length: int = 16
    threshold: float = 0.95
    horizons: int = 0  # layers ahead for which next-gate predictions are made
    scores: int = 0  # router scores kept of each token, the best ones


def llada2_mini() -> Geometry:
    """The shape of LLaDA2.0-mini (bf16 experts of 6 MiB)."""
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
    """Forwards of made-up requests, one at a time.

    `model_seed` makes the model (projections, popularity), `seed` the requests: two traces of one
    model serve as calibration and evaluation.
    """
    model = Model(geometry, process, np.random.default_rng(model_seed))
    pass_id = 0
    for request in range(workload.requests):
        rng = np.random.default_rng([seed, 1, request])
        for record in _request(model, workload, request, pass_id, rng):
            yield record
            pass_id = record.pass_id + 1


def synthetic_manifest(
    geometry: Geometry, workload: Workload, process: Process, *, seed: int, model_seed: int
) -> Manifest:
    """What `trace.json` says about a synthetic trace."""
    return Manifest(
        geometry=geometry,
        weight_kind=WeightKind.SCALED_SUM,
        weight_sum=process.weight_sum,
        confidence_kind=ConfidenceKind.MAX_PROBABILITY,
        model={"id": "synthetic", "revision": str(model_seed), "dtype": "float32"},
        decode={
            "mode": "block_diffusion",
            "block_length": workload.block_length,
            "threshold": workload.threshold,
        },
        seed=seed,
        provenance={"kind": "synthetic", "process": asdict(process), "workload": asdict(workload)},
    )


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
    """The same in memory, without a folder."""
    manifest = synthetic_manifest(geometry, workload, process, seed=seed, model_seed=model_seed)
    records = synthetic(geometry, workload, process, seed=seed, model_seed=model_seed)
    return trace_of_records(manifest, records)


def synthetic_steps(
    geometry: Geometry,
    workload: Workload,
    process: Process = Process(),  # noqa: B008 (frozen)
    *,
    seed: int = 0,
    model_seed: int = 0,
) -> Steps:
    """Steps of a synthetic trace, for benchmarks."""
    return build_steps(
        synthetic_trace(geometry, workload, process, seed=seed, model_seed=model_seed)
    )


def _request(
    model: Model, workload: Workload, request: int, pass_id: int, rng: np.random.Generator
) -> Iterator[ForwardRecord]:
    """Prefill, then block by block the denoising forwards and a commit."""
    process, length = model.process, workload.block_length
    text = Text(process, length, rng)
    context = workload.prompt_blocks * length
    if workload.prompt_blocks:
        blocks = [text.next_block() for _ in range(workload.prompt_blocks)]
        latents = np.concatenate([block.latents(process) for block in blocks])
        own = model.project(np.concatenate([block.content for block in blocks]))
        logits = model.logits(latents, own, np.ones(context), np.zeros(context, dtype=bool))
        yield _record(
            model,
            logits,
            request=request,
            pass_id=pass_id,
            phase=Phase.PREFILL,
            positions=np.arange(context),
            confidence=np.full(context, np.nan),
            state=np.full(context, TokenState.PROMPT),
            predictions=model.predict(logits, workload.horizons, rng),
            scores=model.scores(logits, workload.scores),
        )
        pass_id += 1
    for number in range(workload.blocks):
        block = text.next_block()
        own = model.project(block.content)
        masked = np.ones(length, dtype=bool)
        step = 0
        while True:  # denoise until nothing is masked, then commit
            confidence = block.confidence(process, masked, rng)
            logits = model.logits(block.latents(process), own, confidence, masked)
            accepted = masked & (confidence > workload.threshold)
            if masked.any() and not accepted.any():
                accepted[np.argmax(np.where(masked, confidence, -1.0))] = True
            yield _record(
                model,
                logits,
                request=request,
                pass_id=pass_id,
                phase=Phase.DENOISE if masked.any() else Phase.COMMIT,
                positions=context + np.arange(length),
                confidence=confidence,
                state=np.where(masked, TokenState.MASKED, TokenState.DECODED),
                accepted=accepted,
                block=number,
                step=step if masked.any() else -1,
                context_length=context,
                predictions=model.predict(logits, workload.horizons, rng),
                scores=model.scores(logits, workload.scores),
            )
            pass_id += 1
            if not masked.any():
                break
            block.drift(process, masked, confidence, rng)
            masked &= ~accepted
            step += 1
        context += length


def _record(
    model: Model,
    logits: Floats,
    *,
    request: int,
    pass_id: int,
    phase: Phase,
    positions: NDArray[Any],
    confidence: NDArray[Any],
    state: NDArray[Any],
    predictions: tuple[Prediction, ...],
    scores: RouterScores | None,
    accepted: NDArray[np.bool_] | None = None,
    block: int = -1,
    step: int = -1,
    context_length: int = 0,
) -> ForwardRecord:
    ids, weights = model.route(logits)
    mask = np.zeros(len(positions), dtype=bool) if accepted is None else accepted
    return ForwardRecord(
        request=request,
        pass_id=pass_id,
        phase=phase,
        layers=model.layers,
        expert_ids=ids,
        weights=weights,
        positions=positions,
        token_ids=np.full(len(positions), -1),
        confidence=confidence,
        state=state,
        accepted_mask=mask,
        block=block,
        step=step,
        context_length=context_length,
        accepted=int(mask.sum()),
        produced=int(mask.sum()),
        predictions=predictions,
        scores=scores,
    )
