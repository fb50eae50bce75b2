"""`oled record` and `oled demo` with the bundled model: from prompts to traces and figures."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from oled.paths import traces_dir
from oled.studies import demo

PROMPTS = f"prompts={traces_dir() / 'prompts.jsonl'}"


def test_record_check_simulate(oled, tmp_path):
    words = ["limit=1", "decode.max_new_tokens=16", "decode.mode=forced", "out=trace"]
    done = oled("record", PROMPTS, *words)
    assert done.returncode == 0, done.stderr
    assert "recording added" in done.stdout
    assert done.stderr == ""
    manifest = json.loads((tmp_path / "trace" / "trace.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["decode"]["block_length"] == 16
    assert oled("check", "trace", torch=False).returncode == 0
    assert (
        oled("simulate", "trace=trace", "policy=lru", "cache.slots=8", torch=False).returncode == 0
    )

    again = oled("record", PROMPTS, *words)
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompts=none.jsonl"], "none.jsonl"),
        ([PROMPTS, "model=no/such/model"], "no/such/model"),
        ([PROMPTS, "decode.block_length=1"], "decode.block_length is 1"),
        ([PROMPTS, "model.device=tpu"], "model.device=tpu"),
    ],
)
def test_bad_input_is_one_line(oled, words, message):
    done = oled("record", *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.slow
def test_the_demo_does_the_whole_job_twice(oled, tmp_path):
    done = oled("demo", "out=here", "device=cpu")
    assert done.returncode == 0, done.stderr
    for name in ("trace", "results.parquet", "fig05.png", "fig05.pdf", "timeline.json.gz"):
        assert (tmp_path / "here" / name).exists()
        assert f"here/{name}" in done.stdout
    table = pd.read_parquet(tmp_path / "here" / "results.parquet")
    assert len(table) == len(demo.SLOTS) * len(demo.POLICIES)
    assert (table["bound_relaxed_tpot_ns"] <= table["tpot_ns"]).all()
    assert oled("check", "here/trace", torch=False).returncode == 0
    assert oled("demo", "out=here", "device=cpu").returncode == 0  # replaced


def test_the_demo_leaves_other_folders_alone(oled, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    done = oled("demo", "out=mine", torch=False)
    assert done.returncode == 1
    assert "holds something other than a demo" in done.stderr
