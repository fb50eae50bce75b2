"""`oled quality`, `oled paths` and models that record under a rule: files, figures, refusals."""

from __future__ import annotations

import json

import pytest

from oled.paths import traces_dir

PROMPTS = traces_dir() / "prompts.jsonl"
SHORT = ["decode.max_new_tokens=16"]


def test_a_model_records_under_a_rule_and_is_replayed(oled, tmp_path):
    words = [f"prompts={PROMPTS}", "limit=1", *SHORT, "policy=des_vote", "policy.reroute.share=0.1"]
    done = oled("record", *words, "out=trace")
    assert done.returncode == 0, done.stderr
    assert "routes changed by DesVote(share=0.1)" in done.stdout
    assert oled("check", "trace", torch=False).returncode == 0
    replayed = oled("simulate", "trace=trace", "policy=lru", "cache.slots=8", torch=False)
    assert "routes of a model that ran under DesVote(share=0.1)" in replayed.stdout
    twice = oled("simulate", "trace=trace", "policy=des_seq", torch=False)
    assert twice.returncode == 1
    plain = oled("record", f"prompts={PROMPTS}", "policy=lru", "out=other")
    assert plain.returncode == 1
    assert "policy=lru changes no routes" in plain.stderr
    assert not (tmp_path / "other").exists()


def test_a_bundled_trace_is_routed_again(oled, tmp_path):
    done = oled("simulate", "policy=block_pool", "policy.reroute.share=0.1", "out=out", torch=False)
    assert done.returncode == 0, done.stderr
    assert "route-changing (BlockPool(share=0.1, fixed=False)): cost only" in done.stdout
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert 0 < metrics["kept_gate_mass"] < 1


def test_quality_of_a_rule(oled, tmp_path):
    done = oled("quality", "limit=2", *SHORT, "policy=block_pool", "out=out")
    assert done.returncode == 0, done.stderr
    assert "bits a token" in done.stdout
    assert "free decoding" in done.stdout
    found = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert found["rule"] == "BlockPool(share=0.1875, fixed=False)"
    assert found["prompts"] == 2
    assert found["bits_per_token"] != found["bits_per_token_plain"]
    assert 0 < found["kept_gate_mass"] < 1


@pytest.mark.slow
def test_paths_of_a_model(oled, tmp_path):
    learn = [f"learn.prompts={PROMPTS}", "learn.limit=5"]
    words = [*learn, f"prompts={PROMPTS}", "skip=5", "tolerance=0.5", "free=false", *SHORT]
    done = oled("paths", *words, "out=out")
    assert done.returncode == 0, done.stderr
    assert "expansions kept" in done.stdout
    found = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert found["bytes_share"] < 1
    assert oled("check", "out/trace", torch=False).returncode == 0
    replayed = oled("simulate", "trace=out/trace", "policy=pcomoe", "cache.slots=8", torch=False)
    assert "paths of expert halves, pruned at tolerance 0.5" in replayed.stdout
    again = oled("quality", "paths=out/paths.npz", "limit=1", "free=false", "out=out")
    assert again.returncode == 0, again.stderr


def test_made_up_paths_of_a_trace(oled, tmp_path):
    done = oled("paths", "trace=demo", "share=0.25", "out=out", torch=False)
    assert done.returncode == 0, done.stderr
    assert "128 of 512 expansions kept, by layer 32/32/32/32; 50% of the bytes; made" in done.stdout
    replayed = oled("simulate", "trace=out/trace", "policy=pcomoe", torch=False)
    assert "made up: 25% of the expansions kept at random" in replayed.stdout


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("quality", [], "policy=NAME or paths=FILE.npz"),
        ("quality", ["policy=lru"], "policy=lru changes no routes"),
        ("quality", ["paths=none.npz"], "none.npz: no paths can be read"),
        ("paths", [], "learn.prompts must be given"),
        ("paths", [f"learn.prompts={PROMPTS}", f"prompts={PROMPTS}"], "share a prompt"),
        ("simulate", ["policy=pcomoe"], "needs expert halves"),
    ],
)
def test_bad_input_is_one_line(oled, verb, words, message):
    done = oled(verb, *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
