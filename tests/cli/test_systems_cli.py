"""SAEM on autoregressive text and several GPUs, from the command line."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from oled.trace import (
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Manifest,
    Phase,
    TokenState,
    TraceWriter,
    WeightKind,
)
from tests.cli.test_record_models import checkpoint

CUE = 7
SHAPE = Geometry((0, 1), (16, 16), top_k=2, expert_bytes=(64, 64), num_layers=2)


def write_text(folder, seed: int) -> None:
    """Two requests of 120 tokens; at each CUE the experts change to the other half."""
    rng = np.random.default_rng(seed)
    manifest = Manifest(SHAPE, WeightKind.SUM_ONE, ConfidenceKind.NONE)
    with TraceWriter(folder, manifest) as writer:
        for request in range(2):
            text = rng.integers(20, 30, 120)
            text[20::40] = CUE
            half = 0
            for place, token in enumerate(text.tolist()):
                half = 1 - half if token == CUE else half
                ids = np.stack([[rng.permutation(8)[:2] + 8 * half] for _ in range(2)])
                writer.append(
                    ForwardRecord(
                        request=request,
                        pass_id=120 * request + place,
                        phase=Phase.DECODE,
                        layers=np.arange(2),
                        expert_ids=ids,
                        weights=np.full(ids.shape, 0.5),
                        positions=np.array([place]),
                        token_ids=np.array([token]),
                        confidence=np.array([np.nan]),
                        state=np.array([TokenState.DECODED]),
                        accepted=np.ones(1, np.uint8),
                        context=place,
                        produced=1,
                    )
                )


@pytest.fixture
def texts(tmp_path):
    for seed, name in enumerate(("judged", "learned")):
        write_text(tmp_path / name, seed)
    return ["simulate", "trace=judged", "policy=saem", "cache.slots=8", "calibration=learned"]


def test_stages_of_a_text_are_given_or_learned_and_stand_beside_the_result(oled, texts, tmp_path):
    (tmp_path / "cues.yaml").write_text(f"cues: [[{CUE}]]\n")
    for out, stages in (("given", "cues.yaml"), ("found", "learned")):
        done = oled(*texts, f"workload.stages={stages}", f"out={out}", torch=False)
        assert done.returncode == 0, done.stderr
        assert "stages of the text: 8 of 1 cues" in done.stdout
    found = [json.loads((tmp_path / o / "metrics.json").read_text()) for o in ("given", "found")]
    assert found[0]["hits"] == found[1]["hits"]
    done = oled("simulate", "trace=judged", "policy=tide", "workload.stages=cues.yaml", torch=False)
    assert "needs block and denoising-step marks" in done.stderr  # stages have no steps


def test_without_stages_or_something_to_learn_them_from_it_is_refused(oled, texts):
    done = oled(*texts, torch=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs stages" in done.stderr
    assert "workload.stages=FILE|learned marks them" in done.stderr
    done = oled(*texts[:-1], "workload.stages=learned", torch=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "oled: workload.stages=learned: give the trace to learn from with calibration=NAME|DIR\n"
    )
    done = oled("simulate", "policy=saem", "workload.stages=none.yaml", torch=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "none.yaml: no cues can be read" in done.stderr


def test_saem_replays_what_an_autoregressive_model_recorded(oled, tmp_path):
    """A random model reads text whose letters change at line ends, along its references; cues are
    learned from another recording, or given as phrases of the model's own tokenizer."""
    checkpoint(tmp_path / "model", "qwen3_moe")
    for name, words in (("judged", ("abcd", "wxyz")), ("learned", ("acbd", "wyxz"))):
        text = "".join(f"{word * 6}\n" for word in words * 3)
        lines = [json.dumps({"prompt": prompt, "reference": text}) for prompt in ("One", "Two")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        how = ["decode=autoregressive", "decode.mode=forced", "decode.max_new_tokens=140"]
        where = [f"prompts={name}.jsonl", f"out={name}", "chat=false"]
        done = oled("record", "model=./model", *where, *how)
        assert done.returncode == 0, done.stderr
    (tmp_path / "cues.yaml").write_text('phrases: ["\\n"]\ntokenizer: model/tokenizer.json\n')
    found = {}
    for stages in ("learned", "cues.yaml"):
        words = ["trace=judged", "calibration=learned", f"workload.stages={stages}", "out=run"]
        for policy in ("saem", "saem_oracle", "ktransformers"):
            done = oled("simulate", f"policy={policy}", "cache.slots=3", *words, torch=False)
            assert done.returncode == 0, done.stderr
            metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
            found[stages, policy] = metrics["hit_rate"]
            assert any("stages of the text: " in label for label in metrics["provenance"]["labels"])
    assert "12 of " in " ".join(metrics["provenance"]["labels"])  # six lines in each of two texts
    assert found["cues.yaml", "saem_oracle"] > found["cues.yaml", "ktransformers"]
    assert found["cues.yaml", "saem_oracle"] > found["cues.yaml", "saem"]


def test_several_gpus_print_a_table_and_write_metrics(oled, tmp_path):
    words = ["simulate", "policy=epic", "topology=nodes_2x4", "workload.batch_size=8"]
    done = oled(*words, "hardware=h100_sxm", "cost.geometry=llada2_mini", "out=run", torch=False)
    assert done.returncode == 0, done.stderr
    assert "8 x h100_sxm on nodes_2x4" in done.stdout
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["balanced_tpot_ns"] < found["tpot_ns"]
    assert found["provenance"]["policy_source"].startswith("EPIC, reconstruction")


def test_placements_and_topologies_are_swept_like_anything_else(oled, tmp_path):
    words = [
        "-m",
        "policy=static_ep,epic",
        "topology=nvlink_8,pcie_gen4_4",
        "out=sweep",
        "sweep.workers=1",
    ]
    done = oled("simulate", *words, torch=False)
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert table["policy"].tolist() == ["static_ep", "static_ep", "epic", "epic"]
    assert table["provenance.topology"].tolist() == ["nvlink_8", "pcie_gen4_4"] * 2
    assert (table["tpot_ns"] > 0).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policy=epic"], "'epic' places experts on several GPUs: give topology=NAME"),
        (["policy=lru", "topology=nvlink_8"], "policy 'lru' runs on one GPU; it has no topology"),
        (
            ["policy=epic", "topology=nvlink_8", "timeline=t.json.gz"],
            "timeline is for policies of one GPU",
        ),
        (["policy=epic", "topology=nvlink_8", "policy.placement.spare=-1"], "spare is -1"),
        (["policy=epic", "topology=mine.yaml"], "topology=mine.yaml: there is no such file"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(oled, tmp_path, words, message):
    done = oled("simulate", *words, torch=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_policies_and_topologies_are_listed(oled):
    done = oled("list", "policies", torch=False)
    assert "epic" in done.stdout
    assert "needs topology=NAME" in done.stdout
    assert "nvlink_8" in oled("list", "topologies", torch=False).stdout
