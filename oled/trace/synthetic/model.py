"""The made-up model: its fixed arrays and its router.

Letters: L MoE layers, E experts, k top-k, D latent dimensions, T tokens.
"""

from __future__ import annotations

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.schema import Geometry, Prediction, RouterScores
from oled.trace.synthetic.process import UNROLLED, Process
from oled.types import Bools, Doubles, ExpertIds, Floats


class Model:
    """The made-up model's fixed arrays, and its router."""

    def __init__(self, geometry: Geometry, process: Process, rng: np.random.Generator) -> None:
        _refuse_misfits(geometry, process)
        experts = geometry.experts_per_layer[0]
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
        """Project latents [T, D] to router logits, before anything is added: [T, L, E]."""
        from oled.trace.synthetic import kernels

        logits = np.empty((len(latents), self.projection.shape[1]), dtype=np.float32)
        kernels.multiply(latents, self.projection, logits)
        return logits.reshape(len(latents), len(self.layers), self.experts)

    def logits(self, shared: Floats, own: Floats, confidence: Doubles, masked: Bools) -> Floats:
        """Return router logits [T, L, E].

        `shared` [T, D] is what does not depend on visibility, `own` [T, L, E] the projected
        content of the tokens themselves.
        """
        from oled.trace.synthetic import kernels

        logits = self.project(shared)
        sure = confidence.astype(np.float32)[:, None]
        visible = np.where(masked[:, None], self.visibility * sure, np.float32(1.0))
        kernels.add_own(logits, own, visible, self.bias, masked)
        return logits

    def route(self, logits: Floats) -> tuple[ExpertIds, Floats]:
        """Route tokens: ids and weights [L, T, k]."""
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
        """Return the router's best scores of each token; None if none are kept."""
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
        """Predict by a noisy look at the later layers' routers, 1 to `horizons` layers ahead."""
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


def _refuse_misfits(geometry: Geometry, process: Process) -> None:
    """Refuse what the compiled part can not do."""
    experts, groups = geometry.experts_per_layer[0], process.groups
    if set(geometry.experts_per_layer) != {experts} or experts % groups:
        raise TraceError(
            f"synthetic: all layers need the same number of experts, a multiple of the {groups} "
            f"groups"
        )
    if not 0 < process.kept_groups <= groups:
        raise TraceError(f"synthetic: {process.kept_groups} of {groups} groups can not be kept")
    if process.kept_groups * (experts // groups) < geometry.top_k:
        raise TraceError(
            f"synthetic: {process.kept_groups} groups of {experts // groups} experts hold fewer "
            f"than the top {geometry.top_k}"
        )
    if process.dimensions < 1 or process.dimensions % UNROLLED:
        raise TraceError(
            f"synthetic: {process.dimensions} dimensions, which are no multiple of {UNROLLED}"
        )
