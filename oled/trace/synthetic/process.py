"""The generative process behind `synthetic`: the made-up model and the text it decodes.

Every token has a latent vector of D dimensions: what the request, its block and its position are
about, and noise that drifts from forward to forward. Each MoE layer projects it to router logits
and adds the experts' popularity and their liking for masked or decoded tokens. A masked token's
content is visible only as far as it can be predicted already, that is by its confidence.

Letters: L MoE layers, E experts, k top-k, B block length, D latent dimensions, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.schema import Geometry, Prediction, RouterScores

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Process:
    """Parameters of the process; the defaults are the fit to LLaDA2.0-mini's published figures.

    `experiments/fit_workload.py` is how they were found.
    """

    dimensions: int = 48  # a multiple of 4
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


class Model:
    """The made-up model's fixed arrays, and its router."""

    def __init__(self, geometry: Geometry, process: Process, rng: np.random.Generator) -> None:
        experts = geometry.experts_per_layer[0]
        if set(geometry.experts_per_layer) != {experts} or experts % process.groups:
            raise TraceError(
                f"synthetic: all layers need the same number of experts, a multiple of the "
                f"{process.groups} groups"
            )
        layers = len(geometry.moe_layers)
        depth = np.linspace(0.0, 1.0, layers)[:, None]  # λ
        factor = np.exp(process.layer_spread * rng.standard_normal((2, layers, 1)))
        projection = rng.standard_normal((process.dimensions, layers, experts))
        popularity = rng.standard_normal((layers, experts))
        liking = rng.standard_normal((2, layers, experts))
        self.geometry = geometry
        self.process = process
        self.experts = experts
        self.layers = np.array(geometry.moe_layers, dtype=np.uint16)
        self.projection: Floats = (  # [D, L*E]
            (factor[0] * projection / np.sqrt(process.dimensions))
            .astype(np.float32)
            .reshape(process.dimensions, layers * experts)
        )
        self.bias: Floats = (  # [2, L, E] for decoded and for masked tokens
            process.popularity * factor[1] * popularity
            + process.state * (1.0 - depth / 2) * liking
            - 1.0  # the working point of the sigmoid
        ).astype(np.float32)
        self.visibility: Floats = np.linspace(  # [L] of a sure masked token
            process.visible_first, process.visible_last, layers, dtype=np.float32
        )

    def project(self, latents: Floats) -> Floats:
        """Router logits of latents [T, D], before anything is added: [T, L, E]."""
        from oled.trace.synthetic import kernels

        logits = np.empty((len(latents), self.projection.shape[1]), dtype=np.float32)
        kernels.multiply(latents, self.projection, logits)
        return logits.reshape(len(latents), len(self.layers), self.experts)

    def logits(self, shared: Floats, own: Floats, confidence: Doubles, masked: Mask) -> Floats:
        """Router logits [T, L, E].

        `shared` [T, D] is what does not depend on visibility, `own` [T, L, E] the projected
        content of the tokens themselves.
        """
        from oled.trace.synthetic import kernels

        logits = self.project(shared)
        sure = confidence.astype(np.float32)[:, None]
        visible = np.where(masked[:, None], self.visibility * sure, np.float32(1.0))
        kernels.add_own(logits, own, visible, self.bias, masked)
        return logits

    def route(self, logits: Floats) -> tuple[NDArray[np.uint16], Floats]:
        """The router's choice: ids and weights [L, T, k]."""
        from oled.trace.synthetic import kernels

        process = self.process
        shape = (logits.shape[1], logits.shape[0], self.geometry.top_k)
        ids = np.empty(shape, dtype=np.uint16)
        weights = np.empty(shape, dtype=np.float32)
        kernels.route(
            logits,
            process.groups,
            process.kept_groups,
            process.softmax,
            process.weight_sum,
            ids,
            weights,
        )
        return ids, weights

    def scores(self, logits: Floats, kept: int) -> RouterScores | None:
        """The router's best scores of each token, and whose they are; None if none are kept."""
        from oled.trace.synthetic import kernels

        if kept == 0:
            return None
        shape = (logits.shape[1], logits.shape[0], min(kept, self.experts))
        ids = np.empty(shape, dtype=np.uint16)
        values = np.empty(shape, dtype=np.float32)
        kernels.best_scores(logits, self.process.softmax, ids, values)
        return RouterScores(ids, values)

    def predict(
        self, logits: Floats, horizons: int, rng: np.random.Generator
    ) -> tuple[Prediction, ...]:
        """What a noisy look at the later layers' routers says, 1 to `horizons` layers ahead."""
        said = []
        for ahead in range(1, min(horizons, len(self.layers) - 1) + 1):
            later = logits[:, ahead:]
            noise = self.process.prediction_noise * np.sqrt(ahead)
            noisy = later + noise * rng.standard_normal(later.shape, dtype=np.float32)
            ids, weights = self.route(noisy.astype(np.float32))  # of the later layers
            for layer in range(len(ids)):
                total = np.bincount(
                    ids[layer].ravel(), weights=weights[layer].ravel(), minlength=self.experts
                )
                wanted = np.argsort(-total, kind="stable")[: np.count_nonzero(total)]
                said.append(
                    Prediction(
                        "next_gate",
                        int(self.layers[layer]),
                        int(self.layers[layer + ahead]),
                        wanted,
                        total[wanted],
                    )
                )
        return tuple(said)


class Text:
    """One request's latents, block after block."""

    def __init__(self, process: Process, length: int, rng: np.random.Generator) -> None:
        self._process = process
        self._length = length
        self._rng = rng
        self._topic = process.request * rng.standard_normal(process.dimensions)
        self._theme = rng.standard_normal(process.dimensions)
        self._content = rng.standard_normal(process.dimensions)
        self._ease = float(rng.standard_normal())

    def next_block(self) -> Block:
        """Draw what the next block is about."""
        process, rng = self._process, self._rng
        self._theme = self._autoregress(self._theme, process.block_memory)
        contents, eases = [], []
        for _ in range(self._length):
            self._content = self._autoregress(self._content, process.position_memory)
            fresh = np.sqrt(1.0 - process.ease_memory**2) * float(rng.standard_normal())
            self._ease = process.ease_memory * self._ease + fresh
            contents.append(self._content)
            eases.append(self._ease)
        return Block(
            shared=self._topic + process.block * self._theme,
            content=(process.position * np.array(contents)).astype(np.float32),
            ease=np.array(eases),
            noise=rng.standard_normal((self._length, process.dimensions)),
        )

    def _autoregress(self, latent: Doubles, memory: float) -> Doubles:
        fresh = self._rng.standard_normal(self._process.dimensions)
        moved: Doubles = memory * latent + np.sqrt(1.0 - memory**2) * fresh
        return moved


@dataclass(slots=True)
class Block:
    """The latents of a block's tokens; from forward to forward only the noise changes, and the
    content of tokens that are written anew."""

    shared: Doubles  # [D]
    content: Floats  # [B, D]
    ease: Doubles  # [B]
    noise: Doubles  # [B, D]

    @property
    def length(self) -> int:
        return len(self.ease)

    def latents(self, process: Process) -> Floats:
        """What is visible of every token whatever its state: [B, D]."""
        return (self.shared + process.noise * self.noise).astype(np.float32)

    def confidence(
        self, process: Process, masked: Mask, unsettled: Mask, rng: np.random.Generator
    ) -> Doubles:
        """How sure the model is of each token: [B]; of masked and other unsettled ones less."""
        left: Ints = np.cumsum(masked) - masked  # masked positions to the left
        logit: Doubles = (
            process.confidence_base
            + process.confidence_ease * self.ease
            - process.confidence_left * np.sqrt(left)
            + process.confidence_noise * rng.standard_normal(self.length)
            + process.confidence_decoded * ~unsettled
        )
        result: Doubles = 1.0 / (1.0 + np.exp(-logit))
        return result

    def sureness(self, process: Process, rng: np.random.Generator) -> Doubles:
        """How sure the model is of each token after all before it: [B]."""
        nothing = np.zeros(self.length, dtype=bool)
        return self.confidence(process, nothing, ~nothing, rng)

    def move_on(
        self,
        process: Process,
        masked: Mask,
        confidence: Doubles,
        edited: Mask,
        rng: np.random.Generator,
    ) -> None:
        """To the next forward: the noise drifts, most where the model is unsure."""
        unsure = process.drift_masked * (1.0 - confidence) ** process.drift_power
        speed = np.where(masked, unsure, process.drift_decoded)[:, None]
        fresh = rng.standard_normal(self.noise.shape)
        self.noise = np.sqrt(1.0 - speed**2) * self.noise + speed * fresh
        if edited.any():
            other = process.position * rng.standard_normal(self.content.shape)
            self.content = np.where(edited[:, None], other, self.content).astype(np.float32)
