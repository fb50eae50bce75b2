"""The words of a trace: phases, states, geometry, and the record of one forward.

Letters: L MoE layers, E routed experts of a layer, k top-k, T tokens of a forward, m kept scores.
Layer ids are absolute (a dense layer 0 simply never occurs); sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any, Self

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields
from oled.trace.limits import MAX_EXPERT_BYTES, MAX_LAYERS
from oled.types import Array, Bools, ExpertIds

NO_EXPERT = 65535
"""The id of an unused slot (a token routed to fewer than k experts). Recorders may say -1."""
MAX_TOKENS = 65536
"""Tokens of one forward: `token` is stored in 16 bits."""


class Phase(IntEnum):
    """What a forward is for."""

    PREFILL = 0
    DENOISE = 1
    COMMIT = 2
    DECODE = 3
    DRAFT = 4
    VERIFY = 5


class TokenState(IntEnum):
    """What a token is *before* the forward."""

    MASKED = 0
    DECODED = 1
    PROMPT = 2
    PAD = 3


class WeightKind(StrEnum):
    """What the stored (applied) weights of a token add up to."""

    SUM_ONE = "sum_one"
    SCALED_SUM = "scaled_sum"  # `Manifest.weight_sum`, for example 2.5
    UNNORMALISED = "unnormalised"
    SOFTMAX_SELECTED = "softmax_selected"  # softmax over the selected: sums to 1
    NONE = "none"  # an import without weights: stored as zeros


class ConfidenceKind(StrEnum):
    """What `tokens.confidence` is; taken before finished positions are masked out."""

    MAX_PROBABILITY = "max_probability"
    CHOSEN_PROBABILITY = "chosen_probability"
    NONE = "none"  # NaN everywhere


SIZES = (
    "zero_experts",
    "shared_experts",
    "draft_experts",
    "hidden_size",
    "moe_intermediate_size",
)
"""Fields of a geometry that are not negative, or None."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a mixture-of-experts model, one entry per MoE layer where layers may differ."""

    moe_layers: tuple[int, ...]  # absolute ids, ascending
    experts_per_layer: tuple[int, ...]  # routed experts E
    top_k: int
    expert_bytes: tuple[int, ...]  # bytes of one routed expert of that layer
    num_layers: int  # all layers, dense ones included
    shared_experts: int = 0
    hidden_size: int | None = None
    moe_intermediate_size: int | None = None
    zero_experts: int = 0  # ids E..E+M-1 that compute nothing and have no weights
    expert_parts: int = 1  # so many MoE layers in a row are parts of one layer of the model
    draft_experts: int = 0  # resident ones of draft forwards alone, in units of a routed expert
    name: str | None = None  # in the catalogue of geometries

    def __post_init__(self) -> None:
        for wrong, text in self._faults():
            if wrong:
                raise TraceError(f"geometry: {text}")

    def _faults(self) -> Iterator[tuple[bool, str]]:
        """Yield what may be wrong and how to say it; later rules rely on earlier ones."""
        layers, count = self.moe_layers, len(self.moe_layers)
        yield not layers, "'moe_layers' is empty; a trace needs a MoE layer"
        for key, values in (
            ("experts_per_layer", self.experts_per_layer),
            ("expert_bytes", self.expert_bytes),
        ):
            yield len(values) != count, f"'{key}' has {len(values)} entries for {count} MoE layers"
            yield min(values) < 1, f"'{key}' holds {min(values)}; it must be positive"
        size, parts = max(self.expert_bytes), self.expert_parts
        yield size > MAX_EXPERT_BYTES, f"an expert of {size} bytes is too large"
        uneven = parts < 1 or count % parts != 0
        yield uneven, f"{count} MoE layers do not divide by 'expert_parts' {parts}"
        ascend = all(a < b for a, b in pairwise(layers))
        yield not ascend, f"'moe_layers' {list(layers)} must ascend"
        yield self.num_layers > MAX_LAYERS, f"'num_layers' {self.num_layers} is above {MAX_LAYERS}"
        outside = layers[0] < 0 or layers[-1] >= self.num_layers
        yield (
            outside,
            f"MoE layers {layers[0]}..{layers[-1]} do not fit 'num_layers' {self.num_layers}",
        )
        fewest = min(self.experts_per_layer)
        fits = 1 <= self.top_k <= fewest + self.zero_experts
        yield not fits, f"'top_k' {self.top_k} does not fit a layer of {fewest} experts"
        too_many = max(self.experts_per_layer) + self.zero_experts > NO_EXPERT
        yield too_many, f"more than {NO_EXPERT} experts in a layer"
        for key in SIZES:
            value = getattr(self, key)
            yield value is not None and not 0 <= value < 1 << 31, f"'{key}' is {value}"

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts."""
        return self.num_layers - len(self.moe_layers)

    def dense_index(self) -> dict[int, int]:
        """Map absolute layer ids to places 0..L-1 among the MoE layers."""
        return {layer: index for index, layer in enumerate(self.moe_layers)}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; `Geometry.from_json` reads them back."""
        fields = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }
        for name, none in (("expert_parts", 1), ("draft_experts", 0)):
            if fields[name] == none:
                del fields[name]  # as before there were any: the hash of a trace stays
        return fields

    @classmethod
    def from_json(cls, data: Any, where: str = "geometry") -> Self:
        """Read `to_json`'s form; errors name the key."""
        fields = JsonFields(data, where)
        return cls(
            moe_layers=fields.items("moe_layers", int),
            experts_per_layer=fields.items("experts_per_layer", int),
            top_k=fields.get("top_k", int),
            expert_bytes=fields.items("expert_bytes", int),
            num_layers=fields.get("num_layers", int),
            shared_experts=fields.get("shared_experts", int),
            hidden_size=fields.optional("hidden_size", int),
            moe_intermediate_size=fields.optional("moe_intermediate_size", int),
            zero_experts=fields.get("zero_experts", int),
            expert_parts=fields.optional("expert_parts", int) or 1,
            draft_experts=fields.optional("draft_experts", int) or 0,
            name=fields.optional("name", str),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a predictor said at MoE layer `layer` about MoE layer `target` (absolute ids).

    A target that does not lie ahead is meant in the next forward, `layer` itself included.

    Aggregated over the forward's active tokens: `scores` is the sum of the predicted weights.
    """

    predictor: str
    layer: int
    target: int
    expert_ids: Array  # [n], most wanted first
    scores: Array  # [n], descending

    def __post_init__(self) -> None:
        if self.expert_ids.ndim != 1 or self.expert_ids.shape != self.scores.shape:
            raise TraceError(
                f"prediction of '{self.predictor}' at layer {self.layer}: ids "
                f"{self.expert_ids.shape} and scores {self.scores.shape} must be equally long lists"
            )
        object.__setattr__(self, "expert_ids", as_expert_ids(self.expert_ids))


@dataclass(frozen=True, slots=True, eq=False)
class RouterScores:
    """Router scores of a forward: all E of a layer or the top m, by layer and token."""

    expert_ids: Array  # [Lr, T, m]
    values: Array  # [Lr, T, m], before the selection bias
    biased: Array | None = None  # [Lr, T, m], what the selection used, where it is biased

    def __post_init__(self) -> None:
        if self.values.shape != self.expert_ids.shape:
            raise TraceError("scores and their ids differ in shape")
        object.__setattr__(self, "expert_ids", as_expert_ids(self.expert_ids))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardRecord:
    """One request's share of one model pass; what recorders hand to the writer.

    Any integer or float dtype will do. An unused slot may be -1; the record holds NO_EXPERT.
    """

    request: int
    pass_id: int  # rows of a batch share it
    phase: Phase
    layers: Array  # [Lr] absolute ids, ascending
    expert_ids: Array  # [Lr, T, k]
    weights: Array  # [Lr, T, k] as applied
    positions: Array  # [T]
    token_ids: Array  # [T] input ids, -1 unknown
    confidence: Array  # [T] in 0..1, NaN unknown
    state: Array  # [T] TokenState before the forward
    accepted: Array  # [T] 1 where accepted in this forward
    block: int = -1  # -1 none
    step: int = -1  # denoising step inside the block, -1 none
    context: int = 0  # tokens cached before this forward
    produced: int = 0  # of the accepted, up to and including the end token: the divisor of TPOT
    row_tokens: tuple[Array, ...] | None = None  # per layer, tokens that have rows (gaps)
    measured_ns: int = -1  # wall time of the pass, -1 not measured
    predictions: tuple[Prediction, ...] = ()
    scores: RouterScores | None = None

    def __post_init__(self) -> None:
        for wrong, text in self._faults():
            if wrong:
                raise TraceError(f"record of request {self.request}, pass {self.pass_id}: {text}")
        object.__setattr__(self, "expert_ids", as_expert_ids(self.expert_ids))

    def _faults(self) -> Iterator[tuple[bool, str]]:
        """Yield what may be wrong with the shapes, and how to say it."""
        tokens = self.positions.shape[0]
        fits = 1 <= tokens <= MAX_TOKENS
        yield not fits, f"{tokens} tokens; a forward holds 1 to {MAX_TOKENS}"
        for name in ("positions", "token_ids", "confidence", "state", "accepted"):
            shape = getattr(self, name).shape
            yield shape != (tokens,), f"{name} {shape} must be ({tokens},)"
        ids, lead = self.expert_ids.shape, (self.layers.shape[0], tokens)
        yield (
            len(ids) != 3 or ids[:2] != lead,
            f"expert_ids {ids} must be (layers, tokens, k) with (layers, tokens) = {lead}",
        )
        weights = self.weights.shape
        yield weights != ids, f"weights {weights} differ from expert_ids {ids}"
        rows = lead[0] if self.row_tokens is None else len(self.row_tokens)
        yield rows != lead[0], f"row_tokens has {rows} entries for {lead[0]} layers"

    @property
    def num_rows(self) -> int:
        """Rows of (layer, token) that the record has."""
        if self.row_tokens is None:
            return len(self.layers) * len(self.positions)
        return sum(map(len, self.row_tokens))

    def row_mask(self) -> Bools:
        """Return which (layer, token) pairs have rows: bool[Lr, T]."""
        mask = np.full(self.expert_ids.shape[:2], self.row_tokens is None)
        for row, tokens in zip(mask, self.row_tokens or (), strict=False):
            row[tokens] = True
        return mask


def as_expert_ids(ids: Array) -> ExpertIds:
    """Return ids as they are stored: -1 becomes NO_EXPERT, other ids out of range are refused."""
    if ids.dtype == np.uint16:
        return ids
    if ids.dtype.kind not in "iu":
        raise TraceError(f"expert ids must be integers, not {ids.dtype}")
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) > NO_EXPERT):
        bad = ids[(ids < -1) | (ids > NO_EXPERT)].flat[0]
        raise TraceError(f"expert id {bad} is neither -1 (unused) nor in 0..{NO_EXPERT - 1}")
    # int16 or uint8 first widens, so that -1 wraps to 65535 and 255 stays 255
    return ids.astype(np.int64).astype(np.uint16)
