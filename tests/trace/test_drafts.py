"""Drafts in a trace: what they were worth, and what is left without them, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from small import geometry, manifest, record, write

from oled.trace import ForwardRecord, Phase, TokenState, load
from oled.trace.check import check
from oled.trace.drafts import Verifications, undrafted
from oled.trace.schema import Prediction
from oled.trace.stats import locality_lines, stats

MASKED, DECODED = TokenState.MASKED, TokenState.DECODED
LENGTH = 2  # of a block


def forward(
    phase: Phase, ids: list[list[int]], state: list[int], accepted: list[int], **more: Any
) -> ForwardRecord:
    """One layer, ids [T, k]; tokens stand at positions 4 and 5, over and over."""
    width = len(ids)
    weights = np.where(np.array([ids]) < 0, 0.0, 0.5)
    fields: dict[str, Any] = {
        "phase": phase,
        "block": 2,
        "positions": np.tile([4, 5], width)[:width],
        "token_ids": np.arange(width),
        "confidence": np.full(width, 0.5),
        "state": np.array(state),
        "accepted": np.array(accepted, dtype=np.uint8),
        "context": 4,
    }
    return record([ids], weights, **{**fields, **more})


def block() -> list[ForwardRecord]:
    """Two kept drafts and a given-up one; the model follows the first step, then commits.

    Verified are {0,1,2} in the first state and {1,3} in the second; drafts foresaw {0,1} and {3,5}.
    """

    def said(*experts: int) -> tuple[Prediction, ...]:
        return (Prediction("draft", 1, 1, np.array(experts), np.ones(len(experts))),)

    open_all, open_one = [MASKED, MASKED], [DECODED, MASKED]
    records = [
        forward(Phase.DRAFT, [[0, -1], [1, -1]], open_all, [0, 0], step=0, predictions=said(0, 1)),
        forward(Phase.DRAFT, [[3, -1], [3, -1]], open_one, [0, 0], step=1, predictions=said(3, 5)),
        forward(Phase.DRAFT, [[6, -1], [6, -1]], open_one, [0, 0], step=2),
        forward(
            Phase.VERIFY,
            [[0, 1], [1, 2], [1, 3], [3, 1]],
            [*open_all, *open_one],
            [1, 0, 0, 1],
            step=0,
            produced=2,
        ),
        forward(Phase.COMMIT, [[0, 1], [1, 2]], [DECODED, DECODED], [0, 0]),
    ]
    return [replace(one, pass_id=number) for number, one in enumerate(records)]


def test_what_drafts_were_worth(tmp_path: Path) -> None:
    """One drafted state and it counts; of the needed {0,1,2,3} three were foreseen, of the
    predicted {0,1,3,5} three were needed."""
    trace = load(write(tmp_path / "t", manifest(geometry(layers=1)), block()))
    found = Verifications.of(trace)
    assert found == Verifications(1, 3, 2, 2, 4, 4, 3)
    assert found.metrics() == {
        "draft_acceptance": 1.0,
        "states_per_verify": 2.0,
        "steps_per_verify": 2.0,
        "draft_recall": 0.75,
        "draft_precision": 0.75,
    }


def test_a_draft_that_is_wrong_counts_for_nothing(tmp_path: Path) -> None:
    records = block()
    wrong = np.array([1, 0, 0, 0], dtype=np.uint8)
    records[3] = replace(records[3], accepted=wrong, produced=1)
    trace = load(write(tmp_path / "t", manifest(geometry(layers=1)), records))
    found = Verifications.of(trace)
    assert found is not None
    assert (found.states, found.steps, found.metrics()["draft_acceptance"]) == (2, 1, 0.0)
    plain = undrafted(trace)
    assert plain.forwards.phase.tolist() == [Phase.DENOISE, Phase.COMMIT]
    assert plain.routing.expert_ids.tolist() == [[0, 1], [1, 2], [0, 1], [1, 2]]


def test_without_drafts_each_step_that_counted_is_a_forward(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", manifest(geometry(layers=1)), block())
    plain = undrafted(load(folder))
    forwards = plain.forwards
    assert forwards.phase.tolist() == [Phase.DENOISE, Phase.DENOISE, Phase.COMMIT]
    assert forwards.step.tolist() == [0, 1, -1]
    assert forwards.context.tolist() == [4, 4, 4]
    assert forwards.accepted.tolist() == [1, 1, 0]
    assert forwards.produced.tolist() == [0, 2, 0]
    assert plain.tokens.position.tolist() == [4, 5] * 3
    assert plain.tokens.token_id.tolist() == [0, 1, 2, 3, 0, 1]
    assert plain.routing.forward.tolist() == [0, 0, 1, 1, 2, 2]
    assert plain.routing.token.tolist() == [0, 1] * 3
    ids = [[0, 1], [1, 2], [1, 3], [3, 1], [0, 1], [1, 2]]
    assert plain.routing.expert_ids.tolist() == ids
    assert plain.predictions is None
    found = stats(folder)
    assert (found.chain, found.forwards) == ("denoise", 3)
    assert found.drafts is not None
    assert any("draft acceptance 1.000" in line for line in locality_lines(found))


def test_in_text_a_state_is_a_position(tmp_path: Path) -> None:
    """Three positions verified, two tokens count: two decoding forwards of one token."""
    verify = forward(
        Phase.VERIFY,
        [[0, 1], [2, 3], [4, 5]],
        [DECODED] * 3,
        [1, 1, 0],
        block=-1,
        positions=np.array([6, 7, 8]),
        context=6,
        produced=2,
    )
    trace = load(write(tmp_path / "t", manifest(geometry(layers=1)), [verify]))
    found = Verifications.of(trace)
    assert found == Verifications(1, 0, 3, 2, 6, 0, 0)
    plain = undrafted(trace)
    assert plain.forwards.phase.tolist() == [Phase.DECODE] * 2
    assert plain.forwards.context.tolist() == [6, 7]
    assert plain.tokens.position.tolist() == [6, 7]
    assert plain.routing.expert_ids.tolist() == [[0, 1], [2, 3]]


def test_a_plain_trace_has_no_drafts(tmp_path: Path) -> None:
    commit = replace(block()[-1], pass_id=0)
    folder = write(tmp_path / "t", manifest(geometry(layers=1)), [commit])
    assert Verifications.of(load(folder)) is None
    assert stats(folder).drafts is None


def test_check_knows_drafts(tmp_path: Path) -> None:
    """A draft's weights are a part of a sum, and a verification repeats positions; nothing else
    may, and a draft that nothing verifies is reported."""
    about = manifest(geometry(layers=1))
    assert check(write(tmp_path / "whole", about, block())).ok
    records = block()
    unverified = [*records[:3], replace(records[4], pass_id=3)]
    found = check(write(tmp_path / "cut", about, unverified))
    assert [one.rule for one in found.findings] == ["order"]
    assert "nothing verifies" in found.findings[0].message
    denoise = replace(records[3], phase=Phase.DENOISE)
    found = check(write(tmp_path / "twice", about, [denoise]))
    assert "order" in {one.rule for one in found.findings}
    odd = replace(records[3], positions=np.array([4, 5, 5, 4]))
    assert not check(write(tmp_path / "odd", about, [*records[:3], odd])).ok
