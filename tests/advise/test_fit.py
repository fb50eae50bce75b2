"""What fits a GPU and its host: sums by hand, refusals, and which experts stay."""

from __future__ import annotations

import json

import pytest

from oled.advise.fit import HOST_SHARE, RESERVE_BYTES, fit
from oled.cli.main import main
from oled.errors import UserError
from oled.models.catalogue import model_geometry
from oled.sim.prepared import PreparedTrace

GIB, MIB = 2**30, 2**20
MINI = model_geometry("llada2_mini")
TINY = model_geometry("tiny")
WORDS = ["fit", "model=llada2_mini", "gpu_memory=24GiB", "host_memory=64GiB", "context=4096"]


def test_llada2_mini_by_hand():
    """19 layers of 256 experts of 3 x 2048 x 512 bf16; KV of 20 layers, 4 heads of 128."""
    found = fit(MINI, 24 * GIB, 64 * GIB, 4096)
    assert found.pinned == 19 * 256 * 6 * MIB
    assert found.kv_cache == 4096 * 20 * 2 * 4 * 128 * 2
    assert found.dense == 2 * MINI.other_params
    left = 24 * GIB - found.dense - found.kv_cache - RESERVE_BYTES - 8 * 6 * MIB
    assert found.slots == left // (19 * 6 * MIB) == 188
    assert found.problems == ()


def test_one_more_slot_would_not_fit():
    found = fit(MINI, 24 * GIB, 64 * GIB, 4096)
    resident = (found.slots * found.layers + found.staging) * MINI.expert_bytes
    assert found.dense + found.kv_cache + found.reserve + resident <= found.gpu_memory
    one_more = resident + found.layers * MINI.expert_bytes
    assert found.dense + found.kv_cache + found.reserve + one_more > found.gpu_memory


@pytest.mark.parametrize(
    ("gpu", "host", "context", "words"),
    [
        (2, 64, 65536, "are needed on the GPU without any resident expert"),
        (8, 16, 512, "28.50 GiB of pinned memory"),
    ],
)
def test_what_does_not_fit_is_said(gpu, host, context, words):
    (problem,) = fit(MINI, gpu * GIB, host * GIB, context).problems
    assert words in problem


def test_the_share_of_host_memory_that_may_be_pinned():
    enough = round(28.5 * GIB / HOST_SHARE) + 1
    assert fit(MINI, 24 * GIB, enough, 512).problems == ()
    assert fit(MINI, 24 * GIB, enough - 2, 512).problems != ()


def test_what_fits_as_a_whole_needs_no_host_store():
    found = fit(MINI, 80 * GIB, GIB, 512)
    assert found.slots == 256
    assert found.problems == ()
    assert "nothing needs to be offloaded" in str(found)
    assert "pinned" not in str(found)


def test_batches_and_staging_take_room():
    one, four = (fit(MINI, 24 * GIB, 64 * GIB, 4096, batch_size=n) for n in (1, 4))
    assert four.kv_cache == 4 * one.kv_cache
    assert four.slots < one.slots
    none = fit(MINI, 24 * GIB, 64 * GIB, 4096, staging=0)
    assert "misses run on the CPU" in str(none)
    for wrong in ({"batch_size": 0}, {"staging": -1}):
        with pytest.raises(UserError, match=r"is -?\d; it must be"):
            fit(MINI, GIB, GIB, 1, **wrong)


def test_which_experts_stay_are_those_that_the_trace_used_most():
    trace = PreparedTrace.of("demo")
    found = fit(TINY, GIB + 6 * MIB, GIB, 128, trace=trace)
    steps = trace.steps
    assert 0 < found.slots < 128
    assert len(found.popular) == 4
    share = []
    for layer, ids in enumerate(found.popular):
        tokens = dict.fromkeys(range(128), 0)
        for step in (steps.layer == layer).nonzero()[0]:
            span = slice(steps.offsets[step], steps.offsets[step + 1])
            for expert, count in zip(steps.expert[span], steps.count[span], strict=True):
                tokens[int(expert)] += int(count)
        best = sorted(tokens, key=lambda e: (-tokens[e], e))[: found.slots]
        assert list(ids) == best
        share.append(sum(tokens[e] for e in best) / sum(tokens.values()))
    assert found.popular_share == pytest.approx(sum(share) / 4)
    assert "the most popular first:\n  layer 1: " in str(found)
    with pytest.raises(UserError, match="has 4 MoE layers of 128 experts, llada2_mini has 19 of"):
        fit(MINI, 24 * GIB, 64 * GIB, 128, trace=trace)


def test_the_command_prints_and_writes(capsys, tmp_path):
    assert main(WORDS) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "cache.slots=188 cache.staging=8"
    assert "28.50 GiB  all 4864 experts of 6.00 MiB" in out
    file = tmp_path / "new" / "fit.json"
    small = ["fit", "model=tiny", "gpu_memory=1030MiB", "host_memory=1GiB", "context=128"]
    assert main([*small, "trace=demo", f"out={file}"]) == 0
    written = json.loads(file.read_text())
    assert list(written["experts"]) == ["1", "2", "3", "4"]
    assert all(len(ids) == written["slots"] for ids in written["experts"].values())


def test_what_does_not_fit_is_an_error_in_one_line(capsys):
    assert main([*WORDS[:3], "host_memory=16GiB", "context=4096"]) == 1
    said = capsys.readouterr()
    assert "pinned host store" in said.out
    assert said.err.count("\n") == 1
    assert "cache.slots=" not in said.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "host_memory must be given"),
        ("memory=1GiB", "there is no key 'memory'"),
        ("gpu_memory=24", "gpu_memory: '24' is no amount of memory"),
        ("gpu_memory=-1GiB", "gpu_memory: '-1GiB' is no amount of memory"),
        ("context=4k", "context=4k is no whole number"),
        ("context", "'context' is not key=value"),
    ],
)
def test_wrong_arguments_name_the_key(capsys, change, message):
    words = WORDS[:3] if change is None else [*WORDS, change]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model_names_the_nearest(capsys):
    assert main([*WORDS, "model=llada2mini"]) == 1
    assert "did you mean 'llada2_mini'" in capsys.readouterr().err
