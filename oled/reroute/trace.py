"""A rule applied to a recorded trace: what its routing would have been, layer by layer.

Open loop: every layer-step is routed again from the scores that the unchanged model gave. Under the
rule later layers, forwards and tokens would have been others, so a replay of the result says what
such routing costs, and nothing about text. Forwards of blocks (denoising and commit) are routed
again; prefill and plain decoding stay as they were.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.reroute.inside import route_inside
from oled.reroute.pools import Pools
from oled.reroute.rule import UNKNOWN, Reroute, Routed
from oled.trace.schema import NO_EXPERT, Phase, TokenState, WeightKind
from oled.trace.steps import dense_layers, rows_of_steps
from oled.trace.tables import RoutingTable, ScoreTable, Trace

RULE = "reroute"
"""Key of a manifest's provenance: the rule that a recorded model ran under."""
BLOCK_PHASES = (Phase.DENOISE, Phase.COMMIT)


@dataclasses.dataclass(frozen=True, slots=True)
class RouteChange:
    """What a rule did to the block forwards of a trace. Sums over layer-steps and tokens."""

    rule: str
    kept_gate_mass: float | None  # share of the tokens' own gate weight that is still served
    active_ratio: float | None  # distinct experts after, over before
    unfilled_share: float | None  # slots without an expert, for want of recorded scores

    @property
    def label(self) -> str:
        """What must stand beside every result."""
        text = f"route-changing ({self.rule}): cost only; later hidden states would differ"
        if self.unfilled_share:
            text += f"; {self.unfilled_share:.1%} of slots unfilled: too few scores were recorded"
        return text

    def metrics(self) -> dict[str, float | None]:
        """Flat figures beside the simulator's."""
        return {
            "kept_gate_mass": self.kept_gate_mass,
            "rerouted_active_ratio": self.active_ratio,
            "unfilled_share": self.unfilled_share,
        }


def rule_text(rule: dict[str, Any]) -> str:
    """`DesVote(share=0.15)` from what `Reroute.describe` says."""
    fields = ", ".join(f"{key}={value}" for key, value in rule.items() if key != "rule")
    return f"{rule['rule']}({fields})"


def recorded_rule(trace: Trace) -> str | None:
    """The rule that the recorded model ran under, in words; None where routes are its own."""
    rule = trace.manifest.provenance.get(RULE)
    return None if rule is None else rule_text(rule)


def reroute_trace(trace: Trace, rule: Reroute) -> tuple[Trace, RouteChange]:
    """The trace with the block forwards routed again, and what that changed.

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
    ids, weights, sums = _reroute_rows(trace, trace.scores, rule)
    digest = hashlib.sha256(f"{trace.hash} {rule!r}".encode())
    routing = dataclasses.replace(trace.routing, expert_ids=ids, weights=weights)
    changed = dataclasses.replace(trace, hash=digest.hexdigest(), routing=routing)
    return changed, sums.change(rule_text(rule.describe()))


@dataclasses.dataclass(slots=True)
class _Sums:
    mass: float = 0.0
    kept_mass: float = 0.0
    active_before: int = 0
    active_after: int = 0
    slots: int = 0
    unfilled: int = 0

    def add(self, routed: Routed, ids: NDArray[np.int64]) -> None:
        """Count one layer-step."""
        total = routed.weights.sum(axis=1, keepdims=True)
        share = np.divide(routed.weights, total, out=np.zeros_like(routed.weights), where=total > 0)
        kept = (routed.ids[:, :, None] == ids[:, None, :]).any(axis=2) & (routed.ids != NO_EXPERT)
        self.mass += float(share.sum())
        self.kept_mass += float(share[kept].sum())
        self.active_before += np.unique(routed.ids[routed.real]).size
        self.active_after += np.unique(ids[ids < routed.num_experts]).size
        self.slots += int((routed.ids != NO_EXPERT).sum())
        self.unfilled += int((routed.ids != NO_EXPERT).sum() - (ids != NO_EXPERT).sum())

    def change(self, rule: str) -> RouteChange:
        if not self.slots:
            return RouteChange(rule, None, None, None)
        return RouteChange(
            rule,
            self.kept_mass / self.mass if self.mass else None,
            self.active_after / self.active_before,
            self.unfilled / self.slots,
        )


def _reroute_rows(
    trace: Trace, table: ScoreTable, rule: Reroute
) -> tuple[NDArray[np.uint16], NDArray[np.float32], _Sums]:
    """New ids and weights of all routing rows, [R, k]."""
    forwards, routing, geometry = trace.forwards, trace.routing, trace.geometry
    order = np.argsort(forwards.request, kind="stable")
    begin, end, step_forward, step_layer, _ = rows_of_steps(trace, order)
    score_row = _score_rows(trace, table)
    real = trace.tokens.state != TokenState.PAD
    renormalise = trace.manifest.weight_kind is not WeightKind.UNNORMALISED
    pools, sums = Pools(rule), _Sums()
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
        pool = pools.of((int(forwards.request[forward]), block), layer, routed)
        new_ids, new_weights = route_inside(routed, pool, renormalise=renormalise)
        sums.add(routed, new_ids)
        ids[rows], weights[rows] = new_ids.astype(np.uint16), new_weights
    return ids, weights, sums


def _score_rows(trace: Trace, table: ScoreTable) -> NDArray[np.int64]:
    """The row of scores of each routing row, [R]."""

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
    """The rows of one layer-step with their scores spread over all E experts."""
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
