"""A rule applied to a recorded trace: what its routing would have been, layer by layer.

Open loop: every layer-step is routed again from the scores that the unchanged model gave. Under the
rule later layers, forwards and tokens would have been others, so a replay of the result says what
such routing costs, and nothing about text. Forwards of blocks (denoising and commit) are routed
again; prefill and plain decoding stay as they were.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.change import RouteChange, rule_text
from oled.altered.reroute.rerouter import BLOCK_PHASES, Rerouter
from oled.altered.reroute.rule import UNKNOWN, Reroute, Routed
from oled.errors import UserError
from oled.trace.schema import TokenState, WeightKind
from oled.trace.steps import dense_layers, rows_of_steps
from oled.trace.tables import RoutingTable, ScoreTable, Trace

RULE = "reroute"
"""Key of a manifest's provenance: the rule that a recorded model ran under."""


def recorded_rule(trace: Trace) -> str | None:
    """Return in words the rule that the recorded model ran under; None where routes are its own."""
    rule = trace.manifest.provenance.get(RULE)
    return None if rule is None else rule_text(rule)


def reroute_trace(trace: Trace, rule: Reroute) -> tuple[Trace, RouteChange]:
    """Return the trace with the block forwards routed again, and what that changed.

    Raises UserError where there are no scores, or where routes were changed while recording.
    """
    if trace.scores is None:
        raise UserError(
            f"{trace.path}: {type(rule).__name__} routes again by router scores, and the trace has "
            f"none: record with score_width=M"
        )
    if recorded_rule(trace) is not None:
        raise UserError(
            f"{trace.path}: was recorded under {recorded_rule(trace)} already; replay it under a "
            f"policy without a rule"
        )
    normalised = trace.manifest.weight_kind is not WeightKind.UNNORMALISED
    rerouter = Rerouter(rule, renormalise=normalised)
    ids, weights = _reroute_rows(trace, trace.scores, rerouter)
    digest = hashlib.sha256(f"{trace.hash} {rule!r}".encode())
    routing = dataclasses.replace(trace.routing, expert_ids=ids, weights=weights)
    changed = dataclasses.replace(trace, hash=digest.hexdigest(), routing=routing)
    return changed, rerouter.change


def _reroute_rows(
    trace: Trace, table: ScoreTable, rerouter: Rerouter
) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Return new ids and weights [R, k] of all routing rows."""
    forwards, routing, geometry = trace.forwards, trace.routing, trace.geometry
    order = np.argsort(forwards.request, kind="stable")
    begin, end, step_forward, step_layer, _ = rows_of_steps(trace, order)
    score_row = _score_rows(trace, table)
    real = trace.tokens.state != TokenState.PAD
    ids, weights = routing.expert_ids.copy(), routing.weights.copy()
    for first, last, forward, layer in zip(
        begin.tolist(), end.tolist(), order[step_forward].tolist(), step_layer.tolist(), strict=True
    ):
        block = int(forwards.block[forward])
        if block < 0 or forwards.phase[forward] not in BLOCK_PHASES:
            continue
        rows = np.arange(first, last)
        rows = rows[real[forwards.token_offsets[forward] + routing.token[rows]]]
        if not len(rows):
            continue
        experts = geometry.experts_per_layer[layer]
        routed = _routed(trace, table, rows, score_row[rows], experts)
        place = (int(forwards.request[forward]), block)
        new_ids, new_weights = rerouter.route(place, layer, routed)
        ids[rows], weights[rows] = new_ids.astype(np.uint16), new_weights
    return ids, weights


def _score_rows(trace: Trace, table: ScoreTable) -> NDArray[np.int64]:
    """Return the row of scores of each routing row, [R]."""

    def key(rows: RoutingTable | ScoreTable) -> NDArray[np.int64]:
        place = dense_layers(trace, rows.layer)
        return rows.forward.astype(np.int64) << 32 | place << 16 | rows.token.astype(np.int64)

    wanted, known = key(trace.routing), key(table)
    by_key = np.argsort(known, kind="stable")
    found = by_key[np.minimum(np.searchsorted(known[by_key], wanted), len(known) - 1)]
    lost = np.flatnonzero(known[found] != wanted)
    if len(lost):
        raise UserError(
            f"{trace.path}: routing row {lost[0]} has no scores; run `oled check` on it"
        )
    return found


def _routed(
    trace: Trace,
    table: ScoreTable,
    rows: NDArray[np.int64],
    score_rows: NDArray[np.int64],
    experts: int,
) -> Routed:
    """Return the rows of one layer-step with their scores spread over all E experts."""
    kept = table.expert_ids[score_rows].astype(np.int64)  # [T, m]
    token, slot = np.nonzero(kept < experts)
    scores = np.full((len(rows), experts), UNKNOWN, dtype=np.float32)
    scores[token, kept[token, slot]] = table.values[score_rows][token, slot]
    chosen_by = scores
    if table.biased is not None:
        chosen_by = np.full_like(scores, UNKNOWN)
        chosen_by[token, kept[token, slot]] = table.biased[score_rows][token, slot]
    routing = trace.routing
    return Routed(
        routing.expert_ids[rows].astype(np.int64), routing.weights[rows], scores, chosen_by
    )
