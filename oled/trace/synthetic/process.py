"""Parameters of the generative process behind synthetic traces.

Every token has a latent vector of D dimensions: what the request, its block and its position are
about, and noise that drifts from forward to forward (`text`). Each MoE layer projects it to router
logits and adds the experts' popularity and their liking for masked or decoded tokens (`model`). A
masked token's content is visible only as far as it can be predicted already, that is by its
confidence, which also decides what is accepted (`decode`).
"""

from __future__ import annotations

from dataclasses import dataclass

UNROLLED = 4
"""Latent dimensions that a product adds at a time; their number is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Process:
    """Parameters of the process; the defaults are the fit to LLaDA2.0-mini's published figures.

    `experiments/training/fit_workload.py` is how they were found.
    """

    dimensions: int = 48  # a multiple of UNROLLED
    popularity: float = 0.78
    visible_first: float = 0.15  # visibility of a sure masked token in the first MoE layer
    visible_last: float = 0.15  # and in the last
    noise: float = 0.41
    drift_masked: float = 0.3
    drift_power: float = 2.0
    drift_decoded: float = 0.02
    layer_spread: float = 0.161  # log-normal spread of the layers' factors
    request: float = 0.085
    block: float = 0.25
    block_memory: float = 0.353  # AR(1) over blocks
    position: float = 0.88
    position_memory: float = 0.148  # AR(1) over positions
    state: float = 0.035
    confidence_base: float = 8.25
    confidence_ease: float = 2.0
    ease_memory: float = 0.5  # AR(1) over positions
    confidence_left: float = 3.5  # times the root of masked positions to the left
    confidence_noise: float = 0.3
    confidence_decoded: float = 4.0
    groups: int = 8
    kept_groups: int = 4
    softmax: bool = False  # of the gate weights; else sigmoid
    weight_sum: float = 2.5
    prediction_noise: float = 0.5  # of the next-gate predictor's logits


LAYERED = Process(
    popularity=0.945,
    visible_first=0.3,
    visible_last=0.3,
    noise=0.5,
    drift_masked=0.21,
    drift_decoded=0.033,
    layer_spread=0.5,
    request=0.14,
    block=0.22,
    position=0.99,
    state=0.03,
)
"""Layers that differ strongly: where an allocation of slots to layers has something to gain."""

WIDE = Process(
    popularity=0.25,
    visible_first=0.55,
    visible_last=0.65,
    noise=0.68,
    drift_masked=0.746,
    drift_decoded=0.2,
    request=0.178,
    block=0.1,
    position=1.008,
    state=0.1,
    confidence_base=6.0,
    confidence_left=1.5,
)
"""For speed: 88 active experts a step at B 16, of which 88.5 % were active a forward before."""
