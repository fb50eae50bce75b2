"""Predictions that a trace lacks, made from its routing, as trained predictors might have said."""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.trace.schema import Phase
from oled.trace.steps import build_steps
from oled.trace.tables import PredictionTable, Trace


def foreseen(trace: Trace) -> Trace:
    """The trace with two predictors more: `future_router`, about the same layer in the next forward
    and the layer after this one, and `spice`, about all layers that follow in the forward.

    Each says that the experts of the layer at hand are routed to again, with half their tokens.
    """
    steps = build_steps(trace)
    before = trace.predictions
    assert before is not None
    layers = np.array(trace.geometry.moe_layers)
    count = len(layers)
    rows = [
        (step, target, name)
        for step in range(steps.num_steps)
        for name, ahead in (("future_router", (1, count)), ("spice", range(1, count)))
        for target in (int(steps.layer[step]) + a for a in ahead)
        if name == "future_router" or target < count
    ]
    which = np.array([step for step, _, _ in rows])
    sizes = np.diff(steps.offsets)[which]
    entries = np.concatenate(
        [np.arange(steps.offsets[s], steps.offsets[s + 1]) for s in which.tolist()]
    )
    names = (*before.names, "future_router", "spice")
    more = PredictionTable(
        forward=np.append(before.forward, steps.source[steps.forward[which]]).astype(np.uint32),
        layer=np.append(before.layer, layers[steps.layer[which]]).astype(np.uint16),
        target=np.append(before.target, layers[[t % count for _, t, _ in rows]]).astype(np.uint16),
        predictor=np.append(before.predictor, [names.index(n) for *_, n in rows]).astype(np.uint8),
        offsets=np.append(before.offsets, before.offsets[-1] + np.cumsum(sizes)),
        expert_ids=np.append(before.expert_ids, steps.expert[entries]).astype(np.uint16),
        scores=np.append(before.scores, 0.5 * steps.count[entries]).astype(np.float32),
        names=names,
    )
    return dataclasses.replace(trace, predictions=more)


def drafted(trace: Trace) -> Trace:
    """A block-diffusion trace whose denoising forwards are drafts and verifications in turns.

    Each draft says that what it was routed to, in all layers, is what its verification needs.
    """
    steps = build_steps(trace)
    layers = np.array(trace.geometry.moe_layers)
    count = len(layers)
    phase = trace.forwards.phase.copy()
    denoise = np.flatnonzero(phase == Phase.DENOISE)
    runs = np.split(denoise, np.flatnonzero(np.diff(denoise) > 1) + 1)
    for run in runs:
        phase[run] = Phase.VERIFY
        phase[run[:-1:2]] = Phase.DRAFT
    drafts = np.flatnonzero(phase[steps.source[steps.forward]] == Phase.DRAFT)
    forwards = steps.source[steps.forward[drafts]]
    sizes = np.diff(steps.offsets)[drafts]
    entries = np.concatenate(
        [np.arange(steps.offsets[s], steps.offsets[s + 1]) for s in drafts.tolist()]
    )
    said = PredictionTable(
        forward=forwards.astype(np.uint32),
        layer=np.full(len(drafts), layers[count - 1]).astype(np.uint16),
        target=layers[steps.layer[drafts]].astype(np.uint16),
        predictor=np.zeros(len(drafts), np.uint8),
        offsets=np.append(0, np.cumsum(sizes)),
        expert_ids=steps.expert[entries],
        scores=steps.count[entries].astype(np.float32),
        names=("draft",),
    )
    forwards_then = dataclasses.replace(trace.forwards, phase=phase)
    return dataclasses.replace(trace, forwards=forwards_then, predictions=said)
