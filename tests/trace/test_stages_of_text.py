"""Stages of autoregressive text: cues found, learned and read; what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from small import diffusion, geometry, manifest, record, routes

from oled.paths import model_path
from oled.trace import ForwardRecord, Phase, Trace, TraceError, build_steps, trace_of_records
from oled.trace.stages import STAGES, Cues, boundaries, learn_cues, mark_stages, read_cues

CUE = 7


def text_trace(tokens: list[list[int]], turns: bool = False, **changes: object) -> Trace:
    """One request a list: a prompt of 3 tokens that reads like a cue, then one token a forward.

    `turns`: routes stay in the lower half of the experts, or after each CUE go to the other half.
    """
    rng = np.random.default_rng(1)
    shape = geometry(16, layers=2, top_k=2)
    records: list[ForwardRecord] = []
    for request, text in enumerate(tokens):
        ids, weights = routes(rng, shape, 3)
        common = {"request": request, "pass_id": len(records)}
        prompt = {"phase": Phase.PREFILL, "token_ids": np.full(3, CUE)}
        records.append(record(ids, weights, **common, **prompt))
        half = 0
        for place, token in enumerate(text):
            half = 1 - half if turns and token == CUE else half
            ids = np.stack([[rng.permutation(8)[:2] + 8 * half] for _ in range(2)])
            where = {"token_ids": np.array([token]), "positions": np.array([3 + place])}
            records.append(
                record(ids, request=request, pass_id=len(records), context=3 + place, **where)
            )
    return trace_of_records(manifest(shape, **changes), records)


def test_a_stage_begins_with_the_token_that_completes_a_cue() -> None:
    tokens = np.array([5, 1, 2, 5, 1, 5, 9, 9, 1, 2])
    cues = Cues(((1, 2), (9,)), shortest=1)
    assert np.flatnonzero(boundaries(tokens, cues)).tolist() == [0, 2, 6, 7, 9]
    assert np.flatnonzero(boundaries(tokens, Cues(cues.sequences, 3))).tolist() == [0, 6, 9]
    assert boundaries(tokens[:1], cues).tolist() == [True]
    assert boundaries(tokens[:0], cues).tolist() == []
    assert boundaries(tokens[:1], Cues(((1, 2, 3),))).tolist() == [True]


def test_decode_forwards_are_numbered_in_each_request_and_prompts_are_not() -> None:
    trace = text_trace([[1, CUE, 1, 1], [CUE, 1]])
    marked = mark_stages(trace, Cues(((CUE,),), shortest=1))
    assert marked.forwards.block.tolist() == [-1, 0, 1, 1, 1, -1, 0, 0]
    assert (trace.forwards.block == -1).all()
    assert marked.hash == trace.hash
    assert marked.manifest.provenance[STAGES] == "3 of 1 cues (given)"
    assert build_steps(marked).block.tolist() == marked.forwards.block.tolist()


def test_the_token_where_experts_change_is_learned_and_others_are_not() -> None:
    rng = np.random.default_rng(2)
    text = rng.integers(20, 30, 400)
    text[25::50] = CUE
    cues = learn_cues(text_trace([text.tolist()] * 2, turns=True))
    assert cues.sequences[0] == (CUE,)
    assert len(cues.sequences) <= 3  # two standard errors let a tenth of ten tokens slip through
    assert cues == learn_cues(text_trace([text.tolist()] * 2, turns=True))


def test_cues_are_not_learned_where_experts_do_not_change() -> None:
    with pytest.raises(TraceError, match="after no token do the experts change"):
        learn_cues(text_trace([[5, 6] * 40]))
    with pytest.raises(TraceError, match="no text of 32 tokens"):
        learn_cues(text_trace([[5, 6, 7]]))


def test_cues_are_read_as_ids_and_as_phrases_of_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "cues.yaml"
    file.write_text(yaml.safe_dump({"cues": [[4, 5], [9]], "shortest": 3}))
    assert read_cues(file) == Cues(((4, 5), (9,)), 3, "cues.yaml")
    tokenizer = str(model_path() / "tokenizer.json")
    file.write_text(yaml.safe_dump({"phrases": ["so"], "tokenizer": tokenizer}))
    bare, spaced = read_cues(file).sequences
    assert bare != spaced
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(tokenizer).decode
    assert (decode(bare).strip(), decode(spaced).strip()) == ("so", "so")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1", "cues are a mapping"),
        ("words: [a]", "cues are a mapping"),
        ("cues: [1, 2]", r"lists of token ids, as \[\[12, 7\]"),
        ("cues: []", "none; give at least one"),
        ("cues: [[]]", "none; give at least one"),
        ("{cues: [[1]], shortest: soon}", "shortest is 'soon'"),
        ("{cues: [[1]], shortest: 0}", "at least 1"),
        ("phrases: [so]", "need a tokenizer"),
        ("phrases: so", "must be a list of texts"),
        ("{phrases: [so], tokenizer: none.json}", "tokenizer 'none.json' can not be read"),
        ("cues: [", "no cues can be read"),
    ],
)
def test_wrong_files_of_cues_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cues.yaml"
    file.write_text(content)
    with pytest.raises(TraceError, match=message) as refused:
        read_cues(file)
    assert "cues.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_traces_without_one_token_a_forward_or_without_ids_are_refused() -> None:
    cues = Cues(((CUE,),))
    blocks = trace_of_records(manifest(geometry()), diffusion(geometry()))
    with pytest.raises(TraceError, match="numbers blocks already"):
        mark_stages(blocks, cues)
    with pytest.raises(TraceError, match="decode one token each"):
        learn_cues(blocks)
    with pytest.raises(TraceError, match="token ids are not recorded"):
        mark_stages(text_trace([[1, -1, 1]]), cues)
