"""The optional side tables, brought into the order of the steps.

S steps, E experts of the widest layer, m kept scores, H horizons, P predictions.
"""

from __future__ import annotations

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.reader import ranges_of
from oled.trace.schema import NO_EXPERT, TokenState
from oled.trace.tables import PredictionTable, ScoreTable, Trace
from oled.types import ExpertIds, Floats, Ints


class StepIndex:
    """Finds the step of a (forward, dense layer) of the trace."""

    def __init__(self, source: Ints, layer: Ints, num_layers: int) -> None:
        keys = source * num_layers + layer
        self._num_layers = num_layers
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self.num_steps = len(keys)

    def find(self, source: Ints, layer: Ints) -> Ints:
        """Return step numbers, -1 where there is no such step."""
        keys = source * self._num_layers + layer
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._order[place], -1)


def mean_scores(trace: Trace, table: ScoreTable, layers: Ints, index: StepIndex) -> Floats:
    """Average router scores before the bias over a step's tokens without PAD: f32[steps, E].

    `layers` are the table's layers as places among the MoE layers. Scores that were not kept (top
    m of E) count as 0.
    """
    from oled.trace import kernels

    widest = max(trace.geometry.experts_per_layer)
    impossible = (table.expert_ids >= widest) & (table.expert_ids != NO_EXPERT)
    if impossible.any():
        row, slot = (int(axis[0]) for axis in np.nonzero(impossible))
        raise TraceError(
            f"{trace.path}: scores row {row}: expert id {table.expert_ids[row, slot]}, but layers "
            f"have at most {widest} experts; run `oled check` on it"
        )
    forward = table.forward.astype(np.int64)
    step = index.find(forward, layers)
    rows = trace.forwards.token_offsets[forward] + table.token
    active = (trace.tokens.state[rows] != TokenState.PAD) & (step >= 0)
    result = np.zeros((index.num_steps, widest), dtype=np.float32)
    kernels.mean_by_step(step, active, table.expert_ids, table.values, result, np.zeros(widest))
    return result


def predictions_by_step(
    trace: Trace,
    table: PredictionTable,
    said: Ints,
    about: Ints,
    index: StepIndex,
    predictor: str | None,
) -> tuple[Ints, ExpertIds, Floats, int]:
    """Return what one predictor said, as CSR over rows s*H + h-1: (offsets, experts, scores, H).

    `said` and `about` are the table's two layers as places among the MoE layers; one that does not
    lie ahead is meant in the next forward, h layers on. Predictions made in a declared gap, where
    there is no step, are left out.
    """
    name = table.names[0] if predictor is None else predictor
    if name not in table.names:
        raise TraceError(
            f"{trace.path}: no predictions by '{name}'; recorded: {', '.join(table.names)} "
            f"(`oled record heads=FILE` records what trained predictors say)"
        )
    limit = np.array(trace.geometry.experts_per_layer)[about]
    outside = np.flatnonzero(table.expert_ids >= np.repeat(limit, np.diff(table.offsets)))
    if len(outside):
        raise TraceError(
            f"{trace.path}: a prediction names expert {table.expert_ids[outside[0]]}, which its "
            f"target layer does not have; run `oled check` on it"
        )
    step = index.find(table.forward.astype(np.int64), said)
    wanted = np.flatnonzero((table.predictor == table.names.index(name)) & (step >= 0))
    layers = len(trace.geometry.moe_layers)
    ahead = (about - said - 1)[wanted] % layers + 1
    horizons = int(ahead.max()) if len(ahead) else 0
    row = step[wanted] * horizons + ahead - 1
    order = np.argsort(row, kind="stable")
    row, wanted = row[order], wanted[order]
    twice = np.flatnonzero(row[1:] == row[:-1])
    if len(twice):
        raise TraceError(
            f"{trace.path}: predictions row {wanted[twice[0] + 1]} repeats row "
            f"{wanted[twice[0]]}; run `oled check` on it"
        )
    lengths = np.zeros(index.num_steps * horizons + 1, dtype=np.int64)
    lengths[row + 1] = np.diff(table.offsets)[wanted]
    offsets = np.cumsum(lengths)
    gather = ranges_of(table.offsets[wanted], lengths[row + 1])
    return offsets, table.expert_ids[gather], table.scores[gather], horizons
