"""The words of a trace: phases, states, geometry, and the record of one forward.

Letters: L MoE layers, E routed experts of a layer, k top-k, T tokens of a forward, m kept scores.
Layer ids are absolute (a dense layer 0 simply never occurs); sizes are bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from typing import Any, Self

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields
from oled.trace.limits import MAX_EXPERT_BYTES, MAX_LAYERS
from oled.types import Array, ExpertIds

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
        count = len(self.moe_layers)
        if count == 0:
            raise TraceError("geometry: 'moe_layers' is empty; a trace needs a MoE layer")
        for key, values in (
            ("experts_per_layer", self.experts_per_layer),
            ("expert_bytes", self.expert_bytes),
        ):
            if len(values) != count:
                raise TraceError(
                    f"geometry: '{key}' has {len(values)} entries for {count} MoE layers"
                )
            if min(values) < 1:
                raise TraceError(f"geometry: '{key}' holds {min(values)}; it must be positive")
        if max(self.expert_bytes) > MAX_EXPERT_BYTES:
            raise TraceError(f"geometry: an expert of {max(self.expert_bytes)} bytes is too large")
        if self.expert_parts < 1 or count % self.expert_parts:
            raise TraceError(
                f"geometry: {count} MoE layers do not divide by 'expert_parts' {self.expert_parts}"
            )
        if any(a >= b for a, b in zip(self.moe_layers, self.moe_layers[1:], strict=False)):
            raise TraceError(f"geometry: 'moe_layers' {list(self.moe_layers)} must ascend")
        if self.num_layers > MAX_LAYERS:
            raise TraceError(f"geometry: 'num_layers' {self.num_layers} is above {MAX_LAYERS}")
        if self.moe_layers[0] < 0 or self.moe_layers[-1] >= self.num_layers:
            raise TraceError(
                f"geometry: MoE layers {self.moe_layers[0]}..{self.moe_layers[-1]} do not fit "
                f"'num_layers' {self.num_layers}"
            )
        if not 1 <= self.top_k <= min(self.experts_per_layer) + self.zero_experts:
            raise TraceError(
                f"geometry: 'top_k' {self.top_k} does not fit a layer of "
                f"{min(self.experts_per_layer)} experts"
            )
        if max(self.experts_per_layer) + self.zero_experts > NO_EXPERT:
            raise TraceError(f"geometry: more than {NO_EXPERT} experts in a layer")
        for key, value in (
            ("zero_experts", self.zero_experts),
            ("shared_experts", self.shared_experts),
            ("draft_experts", self.draft_experts),
            ("hidden_size", self.hidden_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ):
            if value is not None and not 0 <= value < 1 << 31:
                raise TraceError(f"geometry: '{key}' is {value}")

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts."""
        return self.num_layers - len(self.moe_layers)

    def dense_index(self) -> dict[int, int]:
        """From an absolute layer id to its place 0..L-1 among the MoE layers."""
        return {layer: index for index, layer in enumerate(self.moe_layers)}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `Geometry.from_json` reads them back."""
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


@dataclass(frozen=True, slots=True, eq=False)
class RouterScores:
    """Router scores of a forward: all E of a layer or the top m, by layer and token."""

    expert_ids: Array  # [Lr, T, m]
    values: Array  # [Lr, T, m], before the selection bias
    biased: Array | None = None  # [Lr, T, m], what the selection used, where it is biased


@dataclass(frozen=True, slots=True, eq=False)
class ForwardRecord:
    """One request's share of one model pass; what recorders hand to the writer.

    Any integer or float dtype will do, the writer casts. An unused slot is NO_EXPERT or -1.
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
    accepted_mask: Array  # [T] 1 where accepted in this forward
    block: int = -1  # -1 none
    step: int = -1  # denoising step inside the block, -1 none
    context_length: int = 0  # tokens cached before this forward
    accepted: int = 0  # tokens accepted in this forward
    produced: int = 0  # of these, up to and including the end token: the divisor of TPOT
    row_tokens: tuple[Array, ...] | None = None  # per layer, tokens that have rows (gaps)
    measured_ns: int = -1  # wall time of the pass, -1 not measured
    predictions: tuple[Prediction, ...] = ()
    scores: RouterScores | None = None

    def __post_init__(self) -> None:
        tokens = self.positions.shape[0]
        if not 1 <= tokens <= MAX_TOKENS:
            raise TraceError(f"{self._name}: {tokens} tokens; a forward holds 1 to {MAX_TOKENS}")
        for name, array in (
            ("positions", self.positions),
            ("token_ids", self.token_ids),
            ("confidence", self.confidence),
            ("state", self.state),
            ("accepted_mask", self.accepted_mask),
        ):
            if array.shape != (tokens,):
                raise TraceError(f"{self._name}: {name} {array.shape} must be ({tokens},)")
        lead = (self.layers.shape[0], tokens)
        if self.expert_ids.ndim != 3 or self.expert_ids.shape[:2] != lead:
            raise TraceError(
                f"{self._name}: expert_ids {self.expert_ids.shape} must be (layers, tokens, k) "
                f"with (layers, tokens) = {lead}"
            )
        if self.weights.shape != self.expert_ids.shape:
            raise TraceError(
                f"{self._name}: weights {self.weights.shape} differ from expert_ids "
                f"{self.expert_ids.shape}"
            )
        if self.row_tokens is not None and len(self.row_tokens) != lead[0]:
            raise TraceError(
                f"{self._name}: row_tokens has {len(self.row_tokens)} entries for {lead[0]} layers"
            )
        if self.scores is not None and self.scores.values.shape != self.scores.expert_ids.shape:
            raise TraceError(f"{self._name}: scores and their ids differ in shape")

    @property
    def _name(self) -> str:
        return f"record of request {self.request}, pass {self.pass_id}"


def as_expert_ids(ids: Array) -> ExpertIds:
    """Ids as they are stored; -1 becomes NO_EXPERT. Other negative or too large ids are refused."""
    if ids.dtype == np.uint16:
        return ids
    if ids.dtype.kind not in "iu":
        raise TraceError(f"expert ids must be integers, not {ids.dtype}")
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) > NO_EXPERT):
        bad = ids[(ids < -1) | (ids > NO_EXPERT)].flat[0]
        raise TraceError(f"expert id {bad} is neither -1 (unused) nor in 0..{NO_EXPERT - 1}")
    # int16 or uint8 first widens, so that -1 wraps to 65535 and 255 stays 255
    return ids.astype(np.int64).astype(np.uint16)
