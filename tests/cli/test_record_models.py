"""`oled record` of other models than the bundled one: SDAR's type, options, refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import LlamaConfig

from oled.trace import Phase, Trace, load
from tests.running.conftest import COMMON, build
from tests.running.conftest import tokenizer as make_tokenizer

PROMPTS = '{"question": "How many pears?", "answer": "33"}\n{"prompt": "def f():", "task_id": 1}\n'
CODE = {"AutoConfig": "code_of_its_own.C", "AutoModelForCausalLM": "code_of_its_own.M"}
MODULE = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping,
)
register_checkpoint_conversion_mapping(
    "own_moe", get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True
)
class C(Qwen3MoeConfig):
    model_type = "own_moe"
class M(Qwen3MoeForCausalLM):
    config_class = C
"""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "p.jsonl").write_text(PROMPTS)
    return "prompts=p.jsonl"


def checkpoint(folder: Path, family: str, **config: object) -> None:
    build(family).save_pretrained(folder)
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def said(trace: Trace) -> str:
    """What the first forward read."""
    first = trace.tokens.token_id[: int(trace.forwards.tokens[0])]
    return make_tokenizer.__wrapped__().decode(first.tolist())


def test_sdar_is_recorded_by_its_type(oled, prompts, tmp_path):
    code = {"AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM"}
    checkpoint(tmp_path / "sdar", "sdar_moe", auto_map=code)
    words = ["decode.max_new_tokens=16", "batch_size=2", "horizons=4", "score_width=8", "seed=3"]
    where = ["model.dtype=bfloat16", "model.device=cpu", "chat=false"]
    done = oled("record", "model=./sdar", prompts, *where, *words, "out=t")
    assert (done.returncode, done.stderr) == (0, "")
    assert oled("check", "t", torch=False).returncode == 0
    trace = load(tmp_path / "t")
    model, decode = trace.manifest.model, trace.manifest.decode
    assert (model["type"], model["dtype"], model["stored_dtype"]) == (
        "sdar_moe",
        "bfloat16",
        "float32",
    )
    assert (decode["block_length"], decode["mask_id"], decode["batch_size"]) == (8, 1, 2)
    assert trace.requests == (0, 1)
    assert trace.manifest.tokenizer["chat"] is False
    assert said(trace) == "Question: How many pears?\nAnswer"  # whole blocks of 8 bytes
    assert (trace.forwards.phase == Phase.COMMIT).any()
    assert set(trace.predictions.target - trace.predictions.layer) == {1, 2, 3}


def test_code_that_comes_with_a_model_runs_only_when_allowed(oled, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    checkpoint(tmp_path / "own", "qwen3_moe", model_type="own_moe", auto_map=CODE)
    (tmp_path / "own" / "code_of_its_own.py").write_text(MODULE)
    words = ["record", "model=./own", prompts, "decode=autoregressive", "decode.max_new_tokens=3"]
    done = oled(*words, "out=t")
    assert done.returncode == 1
    assert "model.trust_remote_code=true lets that run" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "t").exists()
    done = oled(*words, "model.trust_remote_code=true", "out=t")
    assert done.returncode == 0, done.stderr
    trace = load(tmp_path / "t")
    assert said(trace) == "<How many pears?>"
    assert trace.manifest.model["type"] == "own_moe"
    assert set(trace.routing.layer.tolist()) == {1, 2, 3}


def test_a_dense_model_is_refused_before_its_weights_are_read(oled, prompts, tmp_path):
    LlamaConfig(**COMMON).save_pretrained(tmp_path / "dense")
    os.mkfifo(tmp_path / "dense" / "model.safetensors")  # who opens it waits for ever
    done = oled("record", "model=./dense", prompts, "out=t")
    assert done.returncode == 1
    assert "./dense (llama) is not a mixture of experts" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "t").exists()
