"""Route persistence: does a token name the same experts again in the next forward?"""

from __future__ import annotations

import itertools

import numpy as np

from oled.trace.schema import TokenState
from oled.trace.stats.estimate import means_of, spearman
from oled.trace.stats.locality import Cell, Persistence
from oled.trace.steps import LayerPairs, Steps, rows_of_steps
from oled.trace.tables import Trace
from oled.types import Bools, Doubles, Ints

BINS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Edges of the confidence bins."""


def persistence(trace: Trace, steps: Steps, denoise: Ints) -> Persistence | None:
    """Measure what happens to tokens from each `denoise` forward to the next of its block."""
    from oled.trace.stats import kernels

    old = denoise[denoise + 1 < steps.num_forwards]
    new = old + 1  # the next denoising forward of the block, or its commit
    together = (steps.request[old] == steps.request[new]) & (steps.block[old] == steps.block[new])
    old, new = old[together], new[together]
    begin, end, _, _, _ = rows_of_steps(trace, steps.source)
    tokens = len(trace.tokens.state)
    kept = np.zeros(tokens)
    layers = np.zeros(tokens, dtype=np.int64)
    successor = np.full(tokens, -1, dtype=np.int64)
    by_layer = np.zeros((len(steps.num_experts), 2))
    kernels.compare_routes(
        *LayerPairs(steps).of(old, new),
        steps.source[steps.forward],
        steps.layer,
        begin,
        end,
        trace.routing.token,
        trace.routing.expert_ids,
        trace.forwards.token_offsets,
        trace.tokens.position,
        trace.tokens.state,
        kept,
        layers,
        successor,
        by_layer,
    )
    state = trace.tokens.state
    rows = np.flatnonzero(layers > 0)
    if not len(rows):
        return None
    share = kept[rows] / layers[rows]
    confidence = trace.tokens.confidence[rows].astype(np.float64)
    before = state[rows] == TokenState.MASKED
    after = state[successor[rows]] == TokenState.MASKED
    groups: dict[str, Bools] = {
        "masked_to_masked": before & after,
        "masked_to_decoded": before & ~after,
        "decoded_to_decoded": ~before & ~after,
        "decoded_to_masked": ~before & after,  # only where a decoder masks again
    }
    groups = {name: group for name, group in groups.items() if group.any()}
    known = np.isfinite(confidence)
    every = np.ones(len(rows), dtype=bool)
    cells = [
        cell for name, group in groups.items() for cell in _cells(name, group, confidence, share)
    ]
    return Persistence(
        mean=float(share.mean()),
        by_transition={name: float(share[group].mean()) for name, group in groups.items()},
        tokens_by_transition={name: int(group.sum()) for name, group in groups.items()},
        by_confidence=tuple(_cells("all", every, confidence, share)),
        by_confidence_and_transition=tuple(cells),
        spearman={
            name: spearman(confidence[group & known], share[group & known])
            for name, group in {"all": every, **groups}.items()
        },
        by_layer=means_of(by_layer[:, 0], by_layer[:, 1]),
    )


def _cells(name: str, group: Bools, confidence: Doubles, share: Doubles) -> list[Cell]:
    cells = []
    for low, high in itertools.pairwise(BINS):
        upper = confidence <= high + 0.01 if high == BINS[-1] else confidence < high
        chosen = group & (confidence >= low) & upper
        if chosen.any():
            cells.append(Cell(name, low, high, int(chosen.sum()), float(share[chosen].mean())))
    return cells
