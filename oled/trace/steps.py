"""Steps: what a policy is shown, built once per trace and shared by all configurations.

A step is one MoE layer of one forward; an entry is an active expert of a step. Letters: F forwards,
L MoE layers, E experts of the widest layer, H prediction horizons. Everything is CSR: forward f has
steps `step_offsets[f]:step_offsets[f+1]`, step s has entries `offsets[s]:offsets[s+1]`, sorted by
expert id. PAD tokens and zero experts have no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.reader import ranges_of
from oled.trace.schema import NO_EXPERT, TokenState
from oled.trace.side import StepIndex, mean_scores, predictions_by_step
from oled.trace.tables import Trace
from oled.types import Array, ExpertIds, Floats, Ints

GATE, GATE_MASKED, CONF_MASKED, CONF_OPENED = range(4)
"""Columns of `Steps.mass`. With g the weight normalised over the token's top-k and c the token's
confidence (1 where there is none): sum of g; of g over masked tokens; of c*g over masked tokens;
of c*g over opened ones (decoded and prompt)."""
NEVER = 2**62
"""`next_use` of an entry that is not used again."""


class Rows(NamedTuple):
    """The sequences of forwards, each with keys and values of its own."""

    forward: Ints  # [R] which each belongs to
    tokens: Ints  # [R]
    context: Ints  # [R] tokens cached before


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The replay form of a trace; forwards sorted by request, then as recorded."""

    request: Ints  # [F]
    phase: Ints  # [F] Phase
    block: Ints  # [F] -1 none
    step: Ints  # [F] denoising step, -1 none
    tokens: Ints  # [F] T without PAD tokens
    context: Ints  # [F] tokens cached before
    accepted: Ints  # [F]
    produced: Ints  # [F]
    source: Ints  # [F] forward number in the trace
    step_offsets: Ints  # [F+1]
    forward: Ints  # [steps]
    layer: Ints  # [steps] place 0..L-1 in the geometry
    offsets: Ints  # [steps+1]
    expert: ExpertIds  # [entries]
    count: NDArray[np.int32]  # [entries] tokens routed to the expert
    mass: Floats  # [entries, 4] see GATE
    last_token: NDArray[np.int32]  # [entries] largest token*k + slot: order of token-major replay
    num_experts: Ints  # [L]
    expert_bytes: Ints  # [L]
    top_k: int
    scores: Floats | None = None  # [steps, E] mean router score over active tokens
    pred_offsets: Ints | None = None  # [steps*H+1] row s*H+h-1: said at s about h MoE layers ahead,
    # where counting goes on into the next forward: h = L is the same layer there
    pred_expert: ExpertIds | None = None
    pred_score: Floats | None = None
    horizons: int = 0  # H
    rows: Rows | None = None  # of a batch; None: every forward is one sequence

    @property
    def num_forwards(self) -> int:
        """F."""
        return len(self.request)

    @property
    def num_steps(self) -> int:
        """Layer-steps."""
        return len(self.layer)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.num_experts)


def build_steps(
    trace: Trace, *, predictor: str | None = None, previous_confidences: bool = False
) -> Steps:
    """Build the steps in one pass over the raw routing.

    `predictor` chooses among those recorded (the first one). With `previous_confidences` a token
    has that of its position in the forward before, as far as a policy can know it while a forward
    runs; without, the forward's own.
    """
    from oled.trace import kernels  # here, so that reading a trace needs no numba

    forwards, tokens, routing, geometry = (
        trace.forwards,
        trace.tokens,
        trace.routing,
        trace.geometry,
    )
    order = np.argsort(forwards.request, kind="stable")
    begin, end, step_forward, step_layer, step_offsets = rows_of_steps(trace, order)
    num_experts = np.array(geometry.experts_per_layer, dtype=np.int64)
    offsets = np.empty(len(begin) + 1, dtype=np.int64)
    room = int(np.minimum((end - begin) * geometry.top_k, num_experts[step_layer]).sum())
    expert = np.empty(room, dtype=np.uint16)
    count = np.empty(room, dtype=np.int32)
    mass = np.empty((room, 4), dtype=np.float32)
    last_token = np.empty(room, dtype=np.int32)
    row, slot = kernels.aggregate(
        begin,
        end,
        order[step_forward],
        step_layer,
        routing.token,
        routing.expert_ids,
        routing.weights,
        trace.manifest.has_weights,
        forwards.token_offsets,
        tokens.state,
        known_confidences(trace) if previous_confidences else tokens.confidence,
        num_experts,
        geometry.zero_experts,
        offsets,
        expert,
        count,
        mass,
        last_token,
        *kernels.scratch_of(num_experts),
    )
    if row >= 0:
        raise TraceError(_impossible(trace, row, slot))
    entries = int(offsets[-1])
    pads = np.add.reduceat(
        np.append(tokens.state == TokenState.PAD, False).astype(np.int64),
        forwards.token_offsets[:-1],
    )
    steps = Steps(
        request=_ints(forwards.request[order]),
        phase=_ints(forwards.phase[order]),
        block=_ints(forwards.block[order]),
        step=_ints(forwards.step[order]),
        tokens=_ints(forwards.tokens[order]) - pads[order],
        context=_ints(forwards.context[order]),
        accepted=_ints(forwards.accepted[order]),
        produced=_ints(forwards.produced[order]),
        source=_ints(order),
        step_offsets=step_offsets,
        forward=step_forward,
        layer=step_layer,
        offsets=offsets,
        expert=expert[:entries],
        count=count[:entries],
        mass=mass[:entries],
        last_token=last_token[:entries],
        num_experts=num_experts,
        expert_bytes=np.array(geometry.expert_bytes, dtype=np.int64),
        top_k=geometry.top_k,
    )
    return _with_side_tables(trace, steps, predictor)


def known_confidences(trace: Trace) -> Floats:
    """Return for each token the confidence of its position in its request's forward before.

    f32[N], NaN (counts as 1) where the request had not computed the position yet.
    """
    forwards, tokens = trace.forwards, trace.tokens
    request = np.repeat(forwards.request, np.diff(forwards.token_offsets))
    order = np.lexsort((tokens.position, request))  # stable: forwards stay in their order
    same = (np.diff(request[order]) == 0) & (np.diff(tokens.position[order].astype(np.int64)) == 0)
    known = np.full(tokens.confidence.shape, np.nan, np.float32)
    known[order[1:][same]] = tokens.confidence[order[:-1][same]]
    return known


def next_use(steps: Steps, persistent: bool) -> Ints:
    """Return for each entry the next step of its layer that uses the expert, else NEVER: i64.

    Within the request, or in the whole trace if `persistent`.
    """
    from oled.trace import kernels

    result = np.empty(len(steps.expert), dtype=np.int64)
    layers, most = len(steps.num_experts), int(steps.num_experts.max())
    kernels.next_uses(
        steps.request,
        steps.forward,
        steps.layer,
        steps.offsets,
        steps.expert,
        steps.num_experts,
        persistent,
        result,
        np.full((layers, most), kernels.NEVER, dtype=np.int64),
        np.full(layers, -1, dtype=np.int64),
    )
    return result


def _with_side_tables(trace: Trace, steps: Steps, predictor: str | None) -> Steps:
    if trace.scores is None and trace.predictions is None:
        return steps
    if trace.scores is not None:
        index = StepIndex(steps.source[steps.forward], steps.layer, len(steps.num_experts))
        layers = dense_layers(trace, trace.scores.layer)
        steps = replace(steps, scores=mean_scores(trace, trace.scores, layers, index))
    return steps if trace.predictions is None else with_predictions(trace, steps, predictor)


def with_predictions(trace: Trace, steps: Steps, predictor: str | None) -> Steps:
    """Return the steps of `trace` with what one predictor said (None: the first one recorded)."""
    if trace.predictions is None:
        raise TraceError(f"{trace.path}: no predictions by '{predictor}', nor by any other")
    index = StepIndex(steps.source[steps.forward], steps.layer, len(steps.num_experts))
    said = dense_layers(trace, trace.predictions.layer)
    about = dense_layers(trace, trace.predictions.target)
    offsets, expert, score, horizons = predictions_by_step(
        trace, trace.predictions, said, about, index, predictor
    )
    return replace(
        steps, pred_offsets=offsets, pred_expert=expert, pred_score=score, horizons=horizons
    )


def coming_scores(steps: Steps) -> Floats:
    """Return what was predicted at each step of its layer in the next forward: f32[steps, E].

    Means over the forward's tokens, as `Steps.scores`; zeros where nothing was said.
    """
    result = np.zeros((steps.num_steps, int(steps.num_experts.max())), dtype=np.float32)
    if steps.pred_offsets is None or steps.pred_expert is None or steps.pred_score is None:
        return result
    if steps.horizons < steps.num_layers:
        return result
    rows = np.arange(steps.num_steps) * steps.horizons + steps.num_layers - 1
    lengths = steps.pred_offsets[rows + 1] - steps.pred_offsets[rows]
    step = np.repeat(np.arange(steps.num_steps), lengths)
    entry = ranges_of(steps.pred_offsets[rows], lengths)
    tokens = np.maximum(steps.tokens[steps.forward[step]], 1)
    result[step, steps.pred_expert[entry]] = steps.pred_score[entry] / tokens
    return result


class LayerPairs:
    """Finds steps of the same layer in pairs of forwards."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._index = StepIndex(steps.forward, steps.layer, steps.num_layers)

    def of(self, old: Ints, new: Ints) -> tuple[Ints, Ints]:
        """Return the steps of forwards `old` and `new` where both have the layer, pair by pair."""
        begins = self._steps.step_offsets[old]
        lengths = self._steps.step_offsets[old + 1] - begins
        before = ranges_of(begins, lengths)
        after = self._index.find(np.repeat(new, lengths), self._steps.layer[before])
        known = after >= 0
        return before[known], after[known]


def _ints(column: Array) -> Ints:
    return column.astype(np.int64)


def rows_of_steps(trace: Trace, order: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return each step's rows, forward (sorted by request) and dense layer, and `step_offsets`."""
    routing = trace.routing
    forward, layer = routing.forward, routing.layer
    if len(forward) and int(forward.max()) >= len(order):
        row = int(np.argmax(forward))
        raise TraceError(
            f"{trace.path}: routing row {row} belongs to forward {forward[row]}, but there are "
            f"{len(order)} forwards; run `oled check` on it"
        )
    key = (forward.astype(np.uint64) << np.uint64(32)) | (layer.astype(np.uint64) << np.uint64(16))
    key |= routing.token
    disorder = np.flatnonzero(key[1:] <= key[:-1])
    if len(disorder):
        row = int(disorder[0]) + 1
        raise TraceError(
            f"{trace.path}: routing row {row} (forward {forward[row]}, layer {layer[row]}, token "
            f"{routing.token[row]}) is out of order or there twice; run `oled check` on it"
        )
    key >>= np.uint64(16)
    begin = np.flatnonzero(np.append(True, key[1:] != key[:-1])) if len(key) else np.empty(0, int)
    end = np.append(begin[1:], len(key)).astype(np.int64)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    step_forward = rank[forward[begin]]
    by_request = np.argsort(step_forward, kind="stable")
    begin, end, step_forward = begin[by_request], end[by_request], step_forward[by_request]
    step_offsets = np.searchsorted(step_forward, np.arange(len(order) + 1)).astype(np.int64)
    return begin, end, step_forward, dense_layers(trace, layer[begin]), step_offsets


def dense_layers(trace: Trace, layers: ExpertIds) -> Ints:
    """Return absolute layer ids as places among the MoE layers."""
    known = np.array(trace.geometry.moe_layers, dtype=np.int64)
    place = np.minimum(np.searchsorted(known, layers), len(known) - 1).astype(np.int64)
    wrong = np.flatnonzero(known[place] != layers)
    if len(wrong):
        raise TraceError(
            f"{trace.path}: layer {layers[wrong[0]]} is no MoE layer of the geometry; run "
            f"`oled check` on it"
        )
    return place


def _impossible(trace: Trace, row: int, slot: int) -> str:
    routing = trace.routing
    forward, layer, token = routing.forward[row], routing.layer[row], routing.token[row]
    where = f"{trace.path}: routing row {row} (forward {forward}, layer {layer}, token {token})"
    if slot < 0:
        return f"{where}: the forward has {trace.forwards.tokens[forward]} tokens; run `oled check`"
    experts = trace.geometry.experts_per_layer[trace.geometry.moe_layers.index(int(layer))]
    return (
        f"{where}: expert id {routing.expert_ids[row, slot]}, but the layer has {experts} experts "
        f"and {trace.geometry.zero_experts} zero experts (unused slots are {NO_EXPERT}); run "
        f"`oled check` on it"
    )
