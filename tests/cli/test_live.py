"""The verbs run, validate, profile and fit, as a user types them."""

from __future__ import annotations

import json

import pytest

from oled.cli.main import main
from oled.validate import report as report_module


@pytest.fixture
def invoke(oled):
    """(exit code, stdout, stderr) of a command line."""

    def run(*words: str) -> tuple[int, str, str]:
        done = oled(*words)
        return done.returncode, done.stdout, done.stderr

    return run


def test_run_decodes_with_offloaded_experts(invoke, tmp_path):
    timeline = tmp_path / "timeline.json"
    code, out, _ = invoke(
        "run", "model=tiny", "policy=oled", "cache.slots=10", "backend=emulated", "limit=1",
        "decode.max_new_tokens=24", f"timeline={timeline}", f"out={tmp_path}",
    )  # fmt: skip
    assert code == 0
    summary = json.loads((tmp_path / "run.json").read_text())
    assert summary["decisions_identical"]
    assert summary["forwards"] > 5
    assert summary["transfers"] > 0
    assert "decisions: the simulator's" in out
    assert "host store 24.0 MiB" in out
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert "process_name" in names
    assert any(name.startswith("copy L1 E") for name in names)


def test_run_from_storage_gives_the_text_of_memory(invoke, tmp_path):
    words = ("model=tiny", "policy=oled", "cache.slots=10", "limit=1", "decode.max_new_tokens=16")
    texts = {}
    for link in ("memory", "storage"):
        code, out, _ = invoke("run", "backend=cpu", f"link={link}", *words, f"out={tmp_path}")
        assert code == 0
        assert "decisions: the simulator's" in out
        assert ("host store" in out) == (link == "memory")
        texts[link] = json.loads((tmp_path / "run.json").read_text())["texts"]
    assert texts["memory"] == texts["storage"]
    assert not list(tmp_path.glob("*.bin"))


def test_a_named_expert_file_stays_and_is_read_again(invoke, tmp_path):
    file = tmp_path / "experts.bin"
    words = ("trace=demo", "forwards=2", "policy=lru", "cache.slots=20", "backend=cpu")
    for _ in range(2):
        code, out, _ = invoke(
            "run", *words, "link=storage", f"expert_file={file}", f"out={tmp_path / 'out'}"
        )
        assert code == 0
        assert "decisions: the simulator's" in out
    with file.open("r+b") as short:
        short.truncate(1_000_000)
    code, _, err = invoke(
        "run", *words, "link=storage", f"expert_file={file}", f"out={tmp_path / 'out'}"
    )
    assert code == 1
    assert f"{file}: 1,000,000 bytes" in err.strip().splitlines()[-1]


def test_run_tells_what_becomes_of_the_text_where_misses_are_given_up(invoke, tmp_path):
    code, out, _ = invoke(
        "run", "policy=spice", "heads=bundled", "cache.slots=10", "limit=1",
        "decode.max_new_tokens=16", f"out={tmp_path}",
    )  # fmt: skip
    assert code == 0
    summary = json.loads((tmp_path / "run.json").read_text())
    assert summary["decisions_identical"]
    assert summary["dropped"] > 0
    assert set(summary["given_up"]) == {"surrogates", "nothing"}
    for found in summary["given_up"].values():  # which is nearer hangs on what has landed when
        assert found["kl_bits"] > 0
        assert 0 < found["dropped_gate_share"] <= 0.03
    assert "misses given up" in out
    code, _, err = invoke("run", "policy=spice", "limit=1", f"out={tmp_path}")
    assert code == 1
    assert "give heads=FILE" in err


def test_run_runs_a_traces_routing_live(invoke, tmp_path):
    timeline = tmp_path / "timeline.json"
    code, _, _ = invoke(
        "run", "trace=demo", "forwards=4", "policy=lru", "cache.slots=20", "paced=true",
        f"timeline={timeline}", f"out={tmp_path}",
    )  # fmt: skip
    assert code == 0
    assert json.loads((tmp_path / "run.json").read_text())["decisions_identical"]
    events = json.loads(timeline.read_text())["traceEvents"]
    sides = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sides == {"simulated: lru", "live: lru"}


def test_validate_writes_its_report(invoke, tmp_path):
    code, out, _ = invoke(
        "validate", "policies=[lru,hybrimoe]", "cache.slots=[20,50]", "forwards=3", "repeats=1",
        "backend=emulated", "preset=short", "gated=false", f"out={tmp_path}",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["decisions_identical"]
    assert report["outputs_identical"]
    assert report["verdict"] == "pass"
    assert code == 0
    assert 0 <= report["undisturbed_share"] <= 1
    for key in ("tpot_error_median_abs", "tpot_error_max_abs", "forward_error_p95_abs"):
        assert report[key] is None or report[key] >= 0
    assert len(report["configurations"]) == 4
    assert (tmp_path / "validate.png").is_file()
    assert "verdict: pass (of decisions and outputs only)" in out
    assert "undisturbed forwards: " in out
    assert "TPOT error: median " in out


def test_validate_without_keeping_time_has_no_gate(invoke, tmp_path):
    code, out, _ = invoke(
        "validate", "policies=[lru]", "cache.slots=20", "forwards=2", "repeats=1",
        "hardware=emulated", "cost.geometry=null", "pace.kept=false", "pace.dilation=1",
        f"out={tmp_path}",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0
    assert report["verdict"] == "pass"
    assert not report["paced"]
    assert "verdict: pass (of decisions and outputs only)" in out
    assert report["tpot_error_max_abs"] is not None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("run", "backend=cuda"), 1, "finds no CUDA device here; backend=emulated needs none"),
        (("validate", "backend=cuda"), 1, "finds no CUDA device here"),
        (("run", "backend=cdua"), 1, "did you mean 'cuda'"),
        (("run", "backend=cpu", "link=strage"), 1, "did you mean 'storage'"),
        (("run", "link=storage"), 1, "go with backend=cpu, not backend=emulated"),
        (("run", "backend=cpu", "expert_file=a.bin"), 1, "is read with link=storage only"),
        (("run", "backend=cpu", "link=storage", "expert_file=/proc/a"), 1, "/proc/a: "),
        (("run", "backend=cpu", "link=storage", "policy=spice", "heads=bundled"), 1, "link=memory"),
        (("validate", "policies=[des_vote]"), 1, "policy 'des_vote' changes routes"),
        (("run", "policy=belady"), 1, "needs the routing to come"),
        (("run", "workload.batch_size=2"), 1, "decodes live one prompt at a time"),
        (("validate", "preset=long"), 2, "preset"),
        (("run", "polcy=lru"), 2, "policy"),
    ],
)
def test_wrong_usage_is_one_line(invoke, arguments, code, message):
    found, _, err = invoke(*arguments)
    assert found == code
    assert message in err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["profile", "model=tiny"], 2, "out must be given"),
        (["profile", "out=."], 2, "out=. is a folder"),
        (["profile", "out=x.yaml", "backend=cuda"], 1, "finds no CUDA device here"),
    ],
)
def test_plain_keys_too(capsys, arguments, code, message):
    assert main(arguments) == code
    assert message in capsys.readouterr().err


def test_the_report_in_words_names_what_differs():
    row = {
        "policy": "lru", "slots": 20, "tpot_error": None, "forward_error_p95_abs": None,
        "undisturbed_share": 0.0, "decided_alike": 1.0, "decisions_identical": False,
        "outputs_identical": True, "decide_ns_per_forward": 1e6,
        **{f"{side}_tpot_ns{name}": None for side in ("live", "simulated")
           for name in ("", "_p50", "_p95", "_p99")},
        **{f"work_error_{lane}": None for lane in ("gpu", "h2d", "d2h", "cpu")},
    }  # fmt: skip
    text = report_module.text(
        {
            "definitions": ["what is compared"], "configurations": [row], "layer_steps": 4,
            "forwards": 1, "trace": "demo", "hardware": "x", "dilation": 3.0, "gated": True,
            "tpot_error_median_abs": None, "tpot_error_max_abs": None,
            "forward_error_p95_abs": None, "ranking_spearman": None, "ranking_worst_swap": 0.0,
            "undisturbed_share": 0.0, "reasons": ["lru, 20 slots: decisions differ: here"],
            "machine": {"load_average": 1.0, "scheduling": "shared, nice 0"}, "labels": [],
            "verdict": "fail",
        }
    )  # fmt: skip
    assert text.startswith("what is compared\n")
    line = next(line for line in text.splitlines() if line.startswith("lru"))
    assert line.endswith("NO")
    assert "lru, 20 slots: decisions differ: here" in text
    assert text.endswith("verdict: fail")
