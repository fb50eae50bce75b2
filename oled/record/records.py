"""Records of a trace from a pass and its capture."""

from __future__ import annotations

import numpy as np

from oled.running.capture import Capture
from oled.running.decode import DecodingError, Pass, Share
from oled.trace.schema import ForwardRecord, Phase


def forward_records(pass_id: int, step: Pass, capture: Capture) -> list[ForwardRecord]:
    """Build one record for each request that has a share in the pass."""
    return [_record(pass_id, step.phase, share, capture) for share in step.shares]


def refuse_non_finite_weights(forward: int, record: ForwardRecord) -> None:
    """Raise DecodingError where an applied gate weight of this forward is NaN or infinite."""
    wrong = np.argwhere(~np.isfinite(record.weights))
    if len(wrong):
        row, token, slot = wrong[0]
        place = f" ({record.phase.name.lower()}), position {record.positions[token]}"
        problem = (
            f"the router of layer {record.layers[row]} gives the weight "
            f"{record.weights[row, token, slot]}: check the checkpoint, or compute in a wider type "
            f"(model.dtype=float32)"
        )
        raise DecodingError(record.request, forward, place, problem)


def _record(pass_id: int, phase: Phase, share: Share, capture: Capture) -> ForwardRecord:
    return ForwardRecord(
        request=share.request,
        pass_id=pass_id,
        phase=phase,
        layers=capture.layers,
        expert_ids=capture.expert_ids[:, share.tokens],
        weights=capture.weights[:, share.tokens],
        positions=share.positions,
        token_ids=share.token_ids,
        confidence=share.confidence,
        state=share.state,
        accepted=share.accepted,
        block=share.block,
        step=share.step,
        context=share.context,
        produced=share.produced,
        predictions=(*share.predictions, *capture.predictions(share.tokens)),
        scores=capture.scores(share.tokens),
    )
