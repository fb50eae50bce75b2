"""Prompt files, and what becomes of a prompt's text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from oled.errors import UserError
from oled.record import load_prompts, plain_prompt
from oled.running.prompts import tokenize, uses_template

TEMPLATE = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def test_prompts_of_known_files(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"question": "Q?", "answer": "A"}\n\n'
        '{"task_id": 1, "prompt": "def f():\\n", "canonical_solution": "    pass", "test": ""}\n'
        '{"prompt": "Once", "reference": " upon"}\n{"text": "Say"}\n'
    )
    gsm, human, plain, bare = load_prompts(file)
    assert (gsm.text, gsm.reference, gsm.source) == ("Question: Q?\nAnswer:", " A", "p.jsonl:1")
    assert (human.text, human.reference) == ("def f():\n", "    pass")
    assert (plain.text, plain.reference, plain.source) == ("Once", " upon", "p.jsonl:4")
    assert (bare.text, bare.reference) == ("Say", None)
    assert [p.text for p in load_prompts(file, skip=1, limit=2)] == ["def f():\n", "Once"]


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """Strings may hold other line ends, and Windows writes a mark and carriage returns."""
    file = tmp_path / "p.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("a\u2028b", "c\x85d")]
    file.write_bytes("\r\n".join(["\ufeff" + lines[0], lines[1]]).encode())
    assert [prompt.text for prompt in load_prompts(file)] == ["a\u2028b", "c\x85d"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"text": "a"}\n[]', "line 2: expected an object"),
        ('{"question": 3}', "line 1: needs a text field"),
        ("\n", "no prompts left"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        load_prompts(file)
    with pytest.raises(UserError, match="can not be read"):
        load_prompts(tmp_path / "q.jsonl")


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"limit": 0}])
def test_ranges_of_lines_are_checked(tmp_path: Path, wrong: dict[str, int]) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"skip=.* limit="):
        load_prompts(tmp_path / "p.jsonl", **wrong)


@pytest.mark.parametrize(("chat", "expected"), [(None, "<Q?>:"), (True, "<Q?>:"), (False, "Q?")])
def test_a_chat_template_is_used_where_wanted(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    chat: bool | None,
    expected: str,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    (request,) = tokenize([plain_prompt("Q?", " 33")], tokenizer, chat=chat)
    assert tokenizer.decode(request.prompt.tolist()) == expected
    assert tokenizer.decode(request.reference.tolist()) == " 33"
    assert uses_template(tokenizer, chat) is (chat is not False)


def test_a_chat_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    assert not uses_template(tokenizer, None)
    with pytest.raises(UserError, match="no chat template"):
        tokenize([plain_prompt("Q?")], tokenizer, chat=True)


def test_every_request_has_a_seed_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    requests = tokenize([plain_prompt("a"), plain_prompt("b")], tokenizer, seed=7)
    assert [request.seed for request in requests] == [7, 8]


def test_an_empty_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="p:1: the prompt is empty"):
        tokenize([plain_prompt("", source="p:1")], tokenizer)
