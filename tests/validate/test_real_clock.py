"""The verdict on lanes that keep no times, and what else the machine did meanwhile."""

from __future__ import annotations

import json

import numpy as np
import pytest

from oled.cli.main import main
from oled.validate import other_load
from oled.validate.devices import GOALS, definitions, judge_device
from oled.validate.other_load import CpuTimes, is_loaded

ROW = {
    "policy": "lru", "slots": 20, "decisions_identical": True, "first_difference": None,
    "outputs_identical": True, "undisturbed_share": 1.0, "forward_error_p95_abs": 0.5,
    "live_tpot_ns": 100.0, "simulated_tpot_ns": 100.0, "tpot_error": 0.0, "prefill_error": 0.0,
}  # fmt: skip
QUIET = {"others": 0.01, "stolen": 0.0}


def judged(rows, load=QUIET, *, gated=True):
    return judge_device(rows, gated=gated, goals=GOALS["cpu"], load=load)


@pytest.mark.parametrize(
    ("key", "errors", "reasons"),
    [
        ("tpot_error", (0.039, -0.03, 0.01), []),
        ("tpot_error", (0.05, -0.06, 0.01), ["median of |TPOT error| is 5.0% (goal 4%)"]),
        ("prefill_error", (0.05, -0.06, 0.01), ["median of |prefill error| is 5.0% (goal 4%)"]),
        ("prefill_error", (0.0, 0.0, -0.2), ["P95 of |prefill error| is 18.0% (goal 10%)"]),
        ("prefill_error", (None, None, None), []),
    ],
)
def test_prefill_and_decode_have_goals_of_their_own(key, errors, reasons):
    rows = [ROW | {key: error} for error in errors]
    assert judged(rows)["reasons"] == reasons
    assert judged(rows)["verdict"] == ("fail" if reasons else "pass")
    assert judged(rows, gated=False)["verdict"] == "pass"


def test_other_load_gives_no_verdict_on_the_clock_and_hides_no_wrong_output():
    rows = [ROW | {"tpot_error": 0.5}]
    for load in ({"others": 0.2, "stolen": 0.0}, {"others": 0.0, "stolen": 0.06}):
        assert judged(rows, load)["verdict"] == "busy"
    assert judged(rows)["verdict"] == "fail"
    assert judged(rows, None)["verdict"] == "fail"
    wrong = [ROW | {"outputs_identical": False}]
    assert judged(wrong, {"others": 0.9, "stolen": 0.0})["verdict"] == "fail"


def test_the_shares_of_others_come_from_the_systems_counters(monkeypatch, tmp_path):
    stat, own = tmp_path / "stat", iter([1.0, 3.0])
    monkeypatch.setattr(other_load, "_STAT", stat)
    monkeypatch.setattr(other_load.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(other_load.time, "process_time", lambda: next(own))
    stat.write_text("cpu  100 0 100 800 0 0 0 0 50 0\ncpu0 1 1\n")
    before = CpuTimes.now()
    stat.write_text("cpu  500 0 100 1300 0 0 0 100 90 0\ncpu0 1 1\n")
    after = CpuTimes.now()
    shares = after.since(before)  # 10 s in all: 4 s busy, 2 of them ours, 1 s stolen
    assert shares == {"others": pytest.approx(0.2), "stolen": pytest.approx(0.1)}
    assert is_loaded(shares)
    stat.unlink()
    assert CpuTimes.now() is None


def test_the_definitions_name_the_goals():
    told = definitions(0.0, GOALS["cpu"])
    assert "bitwise" in told
    assert "within 4%, its P95 within 10%, and of prefill errors the same" in told
    assert "off by more than 2%" in definitions(0.02, GOALS["cuda"])


@pytest.mark.parametrize("link", ["memory", "storage"])
def test_oled_validate_on_the_real_clock(link, tmp_path, capsys):
    words = ["validate", "backend=cpu", f"link={link}", "policies=[lru,oled]", "cache.slots=20"]
    words += ["forwards=2", "repeats=1", "cost.geometry=null", "hardware=emulated"]
    assert main([*words, "gated=false", f"out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["decisions_identical"]
    assert report["outputs_identical"]
    assert all(row["outputs_error"] == 0.0 for row in report["configurations"])
    assert (report["backend"], report["link"], report["verdict"]) == ("cpu", link, "pass")
    assert np.isfinite(report["prefill_error_median_abs"])
    assert "clock without pacing, prefill: median error " in out
    assert "other processes took " in out
    assert not list(tmp_path.glob("*.bin"))


def test_a_policy_that_writes_back_is_refused_before_the_file_is_made(tmp_path, capsys):
    words = ["validate", "backend=cpu", "link=storage", "policies=[lru,tide_artefact]"]
    assert main([*words, "cost.geometry=null", f"out={tmp_path}"]) == 1
    assert "'tide_artefact' writes evicted experts back" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.bin"))
