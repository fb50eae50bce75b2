"""Predictions for a synthetic trace: a fitted temporal head, and looks ahead that are made up.

In the made-up model a layer's logits are a linear function of what the layer hears, and tell it.
*Temporal head*: a linear layer for each MoE layer, fitted by least squares on other requests of the
same made-up model; it says the logits of the same layer and position in the next forward, and their
sigmoids are written as `future_router`. It cannot know what the process draws anew. *Ahead*: the
made-up layers hear one and the same hidden state, so a head for the next layer would be an oracle;
the process's own next-gate noise stands in for what a real one misses, one layer ahead in
`future_router` and up to eight in `spice`: made up, as `trace.horizons` is. The sharpness of
SPICE's shares is fitted, a number for each distance.

Routing, scores and all else are those of the trace without predictions.

Letters: T tokens of a forward, L MoE layers, E experts, k top-k, n pairs of a token in two forwards
that follow each other.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.models.catalogue import model_geometry
from oled.trace.schema import ForwardRecord, Prediction
from oled.trace.synthetic import Synthetic, synthetic_manifest
from oled.trace.synthetic.model import Model
from oled.trace.synthetic.named import geometry_of
from oled.trace.synthetic.requests import forwards_of
from oled.trace.writer import TraceWriter

Floats = NDArray[np.floating[Any]]

TEMPORAL, SPICE = "future_router", "spice"
AHEAD = 8  # layers that SPICE looks ahead at most
RANK = 1e-9  # variances below this share of the greatest are none: logits have few dimensions
EVERY = 16  # forwards that sharpness is fitted on: each so many-th
SHARPEST, HALVINGS = 64.0, 12


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What was fitted."""

    temporal: Floats  # [L, E + 1, E] from logits and 1 to the logits of the next forward
    sharpness: tuple[float, ...]  # [AHEAD]


class Listening(Model):
    """The made-up model, whose logits of each forward [T, L, E] are heard, and perhaps foretold."""

    heads: Heads | None = None
    width: int = 1  # scores kept of each token
    heard: Floats = np.empty(0)

    def listen(self, seed: int) -> None:
        """Draw the noise of looks ahead from a generator of its own: requests stay as they are."""
        self.noise = np.random.default_rng([seed, 2])

    def predict(
        self, logits: Floats, horizons: int, rng: np.random.Generator
    ) -> tuple[Prediction, ...]:
        self.heard = logits
        return () if self.heads is None else tuple(self._said(self.heads, logits))

    def ahead(self, logits: Floats, distance: int) -> Floats:
        """Return what a look at the layers `distance` ahead sees of their logits."""
        later = logits[:, distance:]
        spread = self.process.prediction_noise * np.sqrt(distance)
        drawn = self.noise.standard_normal(later.shape, dtype=np.float32)
        return (later + np.float32(spread) * drawn).astype(np.float32)

    def _said(self, heads: Heads, logits: Floats) -> Iterator[Prediction]:
        layers, last = self.layers.tolist(), len(self.layers) - 1
        coming = best(sigmoid(foretold(heads.temporal, logits)), self.width)
        for row, total in enumerate(coming):
            yield _prediction(TEMPORAL, layers[row], layers[row], total)
        yield _prediction(TEMPORAL, layers[last], layers[0], coming[0])
        for distance in range(1, min(AHEAD, last) + 1):
            seen = self.ahead(logits, distance)
            if distance == 1:
                for row, total in enumerate(best(sigmoid(seen), self.width)):
                    yield _prediction(TEMPORAL, layers[row], layers[row + 1], total)
            shares = softmax(np.float32(heads.sharpness[distance - 1]) * sigmoid(seen))
            ids = self.route(seen)[0]  # [L - distance, T, k]
            for row, chosen in enumerate(ids.astype(np.int64)):
                mass = np.take_along_axis(shares[:, row], chosen, axis=1)
                total = np.bincount(chosen.ravel(), mass.ravel(), self.experts)
                yield _prediction(SPICE, layers[row], layers[row + distance], total)


def with_heads(spec: Synthetic, folder: Path) -> Path:
    """Write the trace of `spec` with predictions to `folder`; what was there is removed."""
    model = _listening(spec)
    model.heads = fit_heads(spec.calibration())
    model.width = spec.scores or model.experts
    workload = spec.workload_of()
    manifest = synthetic_manifest(
        model.geometry, workload, model.process, seed=spec.seed, model_seed=spec.model_seed
    )
    manifest.provenance["heads"] = f"fitted on seed {spec.calibration().seed}; ahead made up"
    shutil.rmtree(folder, ignore_errors=True)
    with TraceWriter(folder, manifest) as writer:
        for record in _forwards(model, spec):
            writer.append(record)
    return folder


def fit_heads(spec: Synthetic) -> Heads:
    """Fit heads on the requests of `spec`."""
    model = _listening(spec)
    now, then, gates, before = [], [], [], None
    for number, record in enumerate(_forwards(model, spec)):
        if before is not None and record.block >= 0 and record.block == before[0]:
            now.append(before[1])
            then.append(model.heard)
        before = (record.block, model.heard)
        if number % EVERY == 0:
            gates.append((model.heard, record))
    sharpness = tuple(_sharpness(model, gates, distance) for distance in range(1, AHEAD + 1))
    return Heads(_temporal(np.concatenate(now), np.concatenate(then)), sharpness)


def _temporal(now: Floats, then: Floats) -> Floats:
    """Fit least squares from now [n, L, E] to then, layer by layer."""
    fitted = []
    for row in range(now.shape[1]):
        inputs = _with_one(now[:, row]).astype(np.float64)
        variances = np.linalg.pinv(inputs.T @ inputs, rcond=RANK, hermitian=True)
        fitted.append(variances @ (inputs.T @ then[:, row]))
    return np.stack(fitted).astype(np.float32)


def foretold(temporal: Floats, logits: Floats) -> Floats:
    """Return logits of the next forward, as the heads say: [T, L, E]."""
    rows = [_with_one(logits[:, row]) @ head for row, head in enumerate(temporal)]
    return np.stack(rows, axis=1)


def _sharpness(model: Listening, gates: list[tuple[Floats, ForwardRecord]], distance: int) -> float:
    """Return the factor with which the softmax of scores is nearest (KL) to the shares applied.

    The divergence is convex in it; where its slope is 0, the shares' mean score is the softmax's.
    """
    pairs = []
    for logits, record in gates:
        scores = sigmoid(model.ahead(logits, distance)).swapaxes(0, 1)  # [L - distance, T, E]
        chosen = np.take_along_axis(scores, record.expert_ids[distance:].astype(np.int64), axis=2)
        applied = record.weights[distance:] / record.weights[distance:].sum(axis=2, keepdims=True)
        pairs.append((scores, float((applied * chosen).sum())))
    target = sum(total for _, total in pairs)
    low, high = 0.0, SHARPEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reached = sum(_mean_score(middle, scores) for scores, _ in pairs)
        low, high = (middle, high) if reached < target else (low, middle)
    return (low + high) / 2


def _mean_score(sharpness: float, scores: Floats) -> float:
    """Sum over layers and tokens, under the softmax of so many times the scores."""
    return float((softmax(np.float32(sharpness) * scores) * scores).sum(dtype=np.float64))


def best(values: Floats, width: int) -> Floats:
    """Sum over the tokens each token's `width` best: [T, L, E] to [L, E]."""
    border = np.partition(values, -width, axis=-1)[..., -width, None]
    total: Floats = np.where(values >= border, values, 0.0).sum(axis=0, dtype=np.float64)
    return total


def sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))


def softmax(values: Floats) -> Floats:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _with_one(values: Floats) -> Floats:
    return np.concatenate((values, np.ones_like(values[:, :1])), axis=1)


def _prediction(predictor: str, layer: int, target: int, total: Floats) -> Prediction:
    wanted = np.argsort(-total, kind="stable")[: np.count_nonzero(total)]
    return Prediction(predictor, layer, target, wanted, total[wanted])


def _listening(spec: Synthetic) -> Listening:
    geometry = geometry_of(model_geometry(spec.geometry))
    model = Listening(geometry, spec.process_of(), np.random.default_rng(spec.model_seed))
    model.listen(spec.seed)
    return model


def _forwards(model: Model, spec: Synthetic) -> Iterator[ForwardRecord]:
    """Yield the forwards of `oled.trace.synthetic.synthetic`, of this model."""
    workload, pass_id = spec.workload_of(), 0
    for request in range(workload.requests):
        rng = np.random.default_rng([spec.seed, 1, request])
        for record in forwards_of(model, workload, request, pass_id, rng):
            yield record
            pass_id = record.pass_id + 1
