"""Records of a trace from a pass and its capture."""

from __future__ import annotations

from oled.running.capture import Capture
from oled.running.decode import Pass, Share
from oled.trace.schema import ForwardRecord, Phase


def forward_records(pass_id: int, step: Pass, capture: Capture) -> list[ForwardRecord]:
    """Build one record for each request that has a share in the pass."""
    return [_record(pass_id, step.phase, share, capture) for share in step.shares]


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
