"""Help, exit codes and messages: what scripts and people rely on."""

from __future__ import annotations

import re
import time

import pytest

from oled.cli import field, inspection, runs, sizing, studies, traces
from oled.paths import conf_dir

VERBS = [*sizing.VERBS, *runs.VERBS, *studies.VERBS, *field.VERBS, *inspection.VERBS, *traces.VERBS]


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS)], ids=["oled", *VERBS])
def test_help_is_quick_and_loads_no_torch(oled, words):
    began = time.monotonic()
    done = oled(*words, "--help", torch=False, alone=True)
    assert done.returncode == 0, done.stderr
    assert "usage: oled" in done.stdout
    assert done.stderr == ""
    assert time.monotonic() - began < 4  # a second on an idle machine; tests share it


def test_help_names_every_verb_and_exit_code(oled):
    text = oled("--help").stdout
    assert all(re.search(rf"^ +{verb}\b", text, re.MULTILINE) for verb in VERBS)
    assert "2 usage" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulat"], "there is no verb 'simulat'; did you mean 'simulate'?"),
        (["simulate", "cache.slts=8"], "there is no key 'cache.slts'; did you mean 'cache.slots'?"),
        (["simulate", "polcy=lru"], "there is no key 'polcy'; did you mean 'policy'?"),
        (["simulate", "topology=null"], "topology=null: leave it out"),
        (["simulate", "topology=nvlink"], "there is no topology 'nvlink'; did you mean"),
        (["simulate", "policy=lruu"], "there is no policy 'lruu'; did you mean 'lru'?"),
        (["simulate", "trace=dmo"], "there is no trace 'dmo'; did you mean 'demo'?"),
        (["simulate", "runtime=graph"], "there is no runtime 'graph'; did you mean 'graph_fused'?"),
        (["simulate", "-m", "policy=lru,lfuu"], "there is no policy 'lfuu'; did you mean 'lfu'?"),
        (["simulate", "trace=path"], "trace.path must be given"),
        (["simulate", "policy=lru,lfu"], "policy=lru,lfu: these are several values: add -m"),
        (["simulate", "seed=range(1,3)"], "seed=range(1,3): these are several values: add -m"),
        (["simulate", "hardware=4090"], "no hardware '4090'; did you mean 'rtx4090_desktop'?"),
        (["simulate", "policy=LRU"], "there is no policy 'LRU'; did you mean 'lru'?"),
        (["simulate", "hardware=rtx5090"], "did you mean 'rtx5090_xeon8470q'?"),
        (["simulate", "-m", "hydra/launcher=basic", "resume=true"], "is for our own launcher"),
        (
            ["simulate", "cache.scope=laier"],
            "cache.scope: Invalid value 'laier', expected one of [layer, global]",
        ),
        (
            ["simulate", "workload.batch_size=few"],
            "workload.batch_size: Value 'few' of type 'str' could not be converted to Integer",
        ),
        (["simulate", "cache.slots"], "'cache.slots' is not key=value"),
        (["record", "promts=a.jsonl"], "there is no key 'promts'; did you mean 'prompts'?"),
        (["record"], "prompts must be given"),
        (["record", "decode.blok_length=8"], "did you mean 'decode.block_length'?"),
        (["demo", "ot=here"], "there is no key 'ot'; did you mean 'out'?"),
        (["demo", "out"], "'out' is not key=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_code_2(oled, words, message):
    done = oled(*words, torch=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("oled: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "trace=/no/such/folder"], "no trace at /no/such/folder"),
        (["simulate", "hardware=h200@slw"], "hardware=h200@slw: did you mean 'slow'?"),
        (["simulate", "policy=mine.yaml"], "policy=mine.yaml: there is no such file"),
        (["check", "/no/such/folder"], "/no/such/folder"),
        (["stats", "/no/such/folder"], "/no/such/folder"),
        (["plot", "fig05", "/no/such/table"], "there is no results table"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_1(oled, words, message):
    done = oled(*words, torch=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_verb_without_its_arguments_is_wrong_usage(oled):
    done = oled("check")
    assert done.returncode == 2
    assert "TRACE" in done.stderr


def test_the_configuration_can_be_looked_at(oled):
    done = oled("simulate", "cache.slots=0.25", "--cfg", "job", torch=False)
    assert done.returncode == 0
    assert "slots: 0.25" in done.stdout


def test_runs_name_the_bundled_options(oled):
    text = oled("simulate", "--help").stdout
    for group in ("hardware", "runtime", "policy"):
        assert all(file.stem in text for file in (conf_dir() / group).glob("*.yaml"))
