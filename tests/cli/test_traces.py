"""import, export, slice, merge and view from the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "trace"))
from small import diffusion, edit_manifest, geometry, manifest, write

ROWS = "layer,expert\n" + "".join(f"{layer},{layer}\n{layer},0\n" for layer in (1, 2, 1, 2))
FACTS = ["experts=8", "top_k=2", "expert_bytes=1KiB"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "t", manifest(geometry()), diffusion(geometry(), requests=3))


def test_import_check_and_export(oled, tmp_path) -> None:
    (tmp_path / "my moe trace ü.csv").write_text(ROWS)
    done = oled("import", "llama_cpp", "my moe trace ü.csv", "a b", *FACTS, torch=False)
    assert (done.returncode, done.stdout) == (0, "a b\n"), done.stderr
    checked = oled("check", "a b", torch=False)
    assert checked.returncode == 0
    assert "note: the source lacks weights, confidence, requests, token_ids" in checked.stdout
    done = oled("export", "csv", "a b", "long.csv", torch=False)
    assert (done.returncode, done.stdout) == (0, "long.csv\n")
    assert len((tmp_path / "long.csv").read_text().splitlines()) == 1 + 8


def test_policies_refuse_by_name(oled, tmp_path) -> None:
    (tmp_path / "t.csv").write_text(ROWS)
    assert oled("import", "llama_cpp", "t.csv", "t", *FACTS).returncode == 0
    done = oled("simulate", "trace=./t", "policy=oled_priority", "cache.slots=2", torch=False)
    assert done.returncode == 1
    assert "policy 'oled_priority' needs" in done.stderr
    assert "token confidence" in done.stderr


def test_slice_merge_and_view(oled, trace) -> None:
    assert oled("slice", "t", "a", "requests=0-1", "layers=2,3", torch=False).returncode == 0
    assert oled("slice", "t", "b", "requests=2", "layers=2,3", torch=False).returncode == 0
    assert oled("merge", "a", "b", "m", torch=False).stdout == "m\n"
    assert oled("check", "m", torch=False).returncode == 0
    shown = json.loads(oled("view", "m", "--json", "--head", "2", torch=False).stdout)
    assert [table["table"] for table in shown] == ["long", "forwards", "tokens", "routing"]
    assert all(len(table["rows"]) == 2 for table in shown)
    assert shown[0]["rows"][0]["layer"] == 2
    lines = oled("view", "m", "--table", "long", torch=False).stdout.splitlines()
    assert lines[0].startswith("long: one row for each")
    assert "SELECT layer, expert" in lines[-2]
    assert "long.groupby" in lines[-1]


def test_a_partial_trace_needs_a_word(oled, trace) -> None:
    """G10: what a crash has left is named, and used only when that is asked for."""
    edit_manifest(trace, lambda data: data.update(status="partial"))
    (trace / "routing-00001.parquet.unclosed").touch()
    for words in (["simulate", "trace=./t"], ["stats", "t"], ["export", "csv", "t", "x"]):
        done = oled(*words, torch=False)
        assert done.returncode == 1
        assert "t: the trace is partial: 1 closed parts hold forwards 0 to" in done.stderr
        assert "routing-00001.parquet.unclosed never closed" in done.stderr
        assert done.stderr.count("\n") == 1
    assert oled("check", "t", torch=False).returncode == 1
    assert oled("export", "csv", "t", "x", "--partial", torch=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["import", "llama", "t.csv", "x"],
            "no format 'llama' to import; did you mean",
        ),
        (["import", "jsonl", "t", "x", "topk=2"], "has no option 'topk'; did you mean 'top_k'"),
        (["import", "jsonl", "t", "x", "top_k"], "'top_k' is not key=value"),
        (["export", "csv", "t", "x", "a=1"], "export csv has no option 'a'; it takes none"),
        (["slice", "t", "x", "request=1"], "did you mean 'requests'"),
        (["view", "t", "--table", "rows"], "there is no table 'rows'"),
        (["view", "t", "--head", "-1"], "must not be negative"),
    ],
)
def test_wrong_usage(oled, trace, words, message) -> None:
    done = oled(*words, torch=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "jsonl", "nothing", "x"], "nothing: no such file"),
        (["import", "jsonl", "t", "x"], "t: not a file"),
        (["import", "jsonl", "t/trace.json", "x"], "not readable as JSON|expected a JSON"),
        (["export", "csv", "nowhere", "x"], "no trace"),
        (["export", "csv", "t", "t"], "t: exists already"),
        (["slice", "t", "t", "requests=0"], "t: already holds something"),
        (["slice", "t", "x", "requests=7"], "no request 7; there are 0 to 2"),
    ],
)
def test_bad_input(oled, trace, words, message) -> None:
    done = oled(*words, torch=False)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
