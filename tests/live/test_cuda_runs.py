"""Whole runs on the cuda backend, its device played by FIFO queues: traces, models, validation."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from oled.cli.main import main
from oled.errors import UserError
from oled.hardware import load_profile, load_runtime
from oled.live.backends import products
from oled.live.backends.cpu_worker import CpuWay
from oled.live.backends.cuda import cuda_kind
from oled.live.experts import move_the_rest, numbers_of, size_of_the_rest, take_experts
from oled.live.kernels import compute
from oled.live.run import Machine, live_run
from oled.live.run_trace import run_trace
from oled.live.store import HostStore
from oled.models.catalogue import model_geometry
from oled.paths import trace_path
from oled.policies.composition import load_composition
from oled.record import BlockDiffusion, load_model, plain_prompt
from oled.running.modules import moe_layers
from oled.sim.settings import Settings
from oled.trace import load
from oled.validate import report as in_words
from oled.validate.devices import judge_device
from oled.validate.pace import Pace
from oled.validate.pairs import Plan
from oled.validate.run import validate
from tests.live.build import RESIDENT
from tests.live.lazy_device import STREAMS, LazyDevice
from tests.running.conftest import build

NARROW = dataclasses.replace(
    model_geometry("llada2_mini"), name="narrow", hidden_size=64, moe_intermediate_size=32
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kind(**device):
    return cuda_kind(LazyDevice(STREAMS, **device), CpuWay(widened=False, threads=1))


def machine():
    return load_profile("rtx5090_xeon8470q"), load_runtime("graph_fused")


def test_a_traces_routing_runs_with_experts_of_another_models_size():
    done = run_trace(
        "demo", load_composition("oled"), Settings(slots=20), *machine(), NARROW, kind=kind(),
        forwards=6,
    )  # fmt: skip
    assert done.difference is None
    assert done.summary()["transfers"] > 0
    assert done.summary()["cpu_executions"] > 0


def test_what_does_not_fit_is_refused_before_the_experts_are_made(monkeypatch):
    """At LLaDA2.0-mini's size the demo's 512 experts are 3 GiB."""
    monkeypatch.setattr(HostStore, "random", lambda *_: pytest.fail("experts were allocated"))
    mini = model_geometry("llada2_mini")
    arguments = "demo", load_composition("lru"), Settings(slots=20), *machine(), mini
    with pytest.raises(UserError, match=r"slots need 528\.0 MiB of device memory, 100\.0 MiB"):
        run_trace(*arguments, kind=kind(memory=100 * 2**20), forwards=2)
    monkeypatch.setattr("oled.live.backends.kind.free_host_memory", lambda: 2**30)
    with pytest.raises(UserError, match=r"host store 3,072\.0 MiB, pinned 3,072\.0 MiB"):
        run_trace(*arguments, kind=kind(), forwards=2)


def validated(kind, **changes):
    profile, runtime = machine()
    return validate(
        load(trace_path("demo")),
        Plan(("lru", "oled", "promoe"), (20,), forwards=4, repeats=1),
        dataclasses.replace(profile, **changes),
        runtime,
        Pace(1.0),
        Settings(slots=20),
        kind=kind,
        geometry=NARROW,
    )


def test_validation_of_a_foreign_profile_judges_decisions_and_outputs_only():
    report = validated(kind())
    assert report["backend"] == "cuda"
    assert report["verdict"] == "pass"
    assert report["decisions_identical"]
    assert report["outputs_identical"]
    errors = {r["policy"]: r["outputs_error"] for r in report["configurations"]}
    assert errors["lru"] == 0
    assert errors["oled"] < 0.02
    assert any(label.startswith("foreign profile: rtx5090") for label in report["labels"])
    text = in_words.text(report)
    assert "Real lanes: Outputs count as identical" in text
    assert "foreign profile: rtx5090_xeon8470q was not measured as one, this is lazy" in text


def test_validation_with_a_profile_of_the_device_judges_the_clock():
    """Queues on a CPU are not a GPU: the clock is far off, or the machine too busy to tell."""
    report = validated(kind(), device="lazy device")
    assert report["verdict"] in ("fail", "busy")
    told = any("median of |TPOT error|" in reason for reason in report["reasons"])
    assert told == (report["verdict"] == "fail")
    assert not any("foreign" in label for label in report["labels"])


def test_the_resident_run_keeps_as_many_experts_as_fit():
    size = 3 * 64 * 32 * 2
    report = validated(kind(memory=200 * size + 512 * 2**20))
    assert report["resident_share"] == pytest.approx((200 - 8) / 512, abs=1e-3)
    assert report["outputs_identical"]


ROW = {
    "policy": "lru", "slots": 20, "decisions_identical": True, "first_difference": None,
    "outputs_identical": True, "live_tpot_ns": 100.0, "simulated_tpot_ns": 100.0,
    "tpot_error": 0.0, "forward_error_p95_abs": 0.0, "undisturbed_share": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "verdict", "reason"),
    [
        ((0.01, -0.02, 0.03), "pass", None),
        ((0.04, -0.05, 0.01), "fail", "median of |TPOT error| is 4.0% (goal 3%)"),
        ((0.01, 0.0, 0.2), "fail", "P95 of |TPOT error| is 18.1% (goal 8%)"),
    ],
)
def test_the_goals_for_a_device(errors, verdict, reason):
    rows = [
        ROW | {"tpot_error": e, "live_tpot_ns": t * (1 + e), "simulated_tpot_ns": t}
        for e, t in zip(errors, (100.0, 200.0, 400.0), strict=True)
    ]
    found = judge_device(rows, gated=True)
    assert found["verdict"] == verdict
    assert found["reasons"] == ([] if reason is None else [reason])
    assert judge_device(rows, gated=False)["verdict"] == "pass"


def test_a_busy_host_gives_no_verdict_on_the_clock():
    rows = [ROW | {"tpot_error": 0.5}, ROW | {"undisturbed_share": 0.5}]
    assert judge_device(rows, gated=True)["verdict"] == "busy"
    rows.append(ROW | {"outputs_identical": False})
    assert judge_device(rows, gated=True)["verdict"] == "fail"


def test_a_swapped_ranking_is_no_pass():
    rows = [
        ROW | {"live_tpot_ns": 106.0, "simulated_tpot_ns": 103.0, "tpot_error": 0.029},
        ROW | {"live_tpot_ns": 101.0, "simulated_tpot_ns": 104.0, "tpot_error": -0.029},
    ]
    (reason,) = judge_device(rows, gated=True)["reasons"]
    assert reason == "worst swap of the ranking is 5.0% (goal 3%)"


@pytest.mark.parametrize(("dtype", "policy"), [("float32", "oled"), ("bfloat16", "lru")])
def test_a_model_decodes_the_same_text_as_with_all_experts_resident(dtype, policy):
    """On this device computation is never late: the model's own layers run beside it."""
    texts = []
    for chosen, slots in ((policy, 10), (RESIDENT, 128)):
        done = live_run(
            load_model("tiny", "cpu", dtype),
            [plain_prompt("Question: Tom has 3 apples and buys 4 more. How many has he?\nAnswer:")],
            BlockDiffusion(block_length=16, max_new_tokens=32, threshold=0.9),
            load_composition(chosen),
            Settings(slots=slots),
            Machine(*machine()),
            kind=kind(),
        )
        texts.append(done.texts)
        assert done.preflight.pinned == done.preflight.store == 512 * 3 * 128 * 32 * BYTES[dtype]
        assert done.preflight.beside > 0
        assert (done.entries[:, 2] >= done.entries[:, 1]).all()
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 10


BYTES = {"float32": 4, "bfloat16": 2}


def test_what_is_not_an_expert_goes_to_the_device_and_experts_stay():
    loaded = load_model("tiny", "cpu", "float32")
    layers = moe_layers(loaded.model)
    store = take_experts(layers)
    rest = size_of_the_rest(loaded.model, layers)
    move_the_rest(loaded.model, layers, "meta")
    experts = {id(p) for entry in layers for p in entry.experts.parameters()}
    for parameter in loaded.model.parameters():
        assert (parameter.device.type == "meta") == (id(parameter) not in experts)
    assert all(buffer.device.type == "meta" for buffer in loaded.model.buffers())
    whole = sum(
        p.nbytes for p in {id(p): p for p in load_model("tiny").model.parameters()}.values()
    )
    buffers = sum(b.nbytes for b in load_model("tiny").model.buffers())
    assert rest == whole + buffers - store.block.nbytes


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_half_precision_models_of_every_layout_are_read_right(family):
    """`take_experts` proves the store's arithmetic against the module's own."""
    model = build(family).to(torch.bfloat16)
    store = take_experts(moe_layers(model))
    assert store.numbers.name == "bfloat16"
    with pytest.raises(UserError, match="is in bfloat16: this backend computes in float32"):
        numbers_of(moe_layers(model), ("float32",))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_products_are_the_modules_own(family):
    """Every layout of gate and up, biases and both gates: beside the compiled kernel."""
    store = take_experts(moe_layers(build(family)))
    form, experts = store.form, torch.from_numpy(store.rows(0))
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(5, form.hidden, generator=rng)
    between, y = torch.empty(5, 2 * form.width), torch.empty(5, form.hidden)
    with torch.no_grad():
        products.compute([experts[1], experts[0]], [2, 3], x, between, y, form)
    expected = np.zeros((5, form.hidden), np.float32)
    compute(
        store.rows(0), np.array([1, 0]), np.arange(2), np.array([0, 2, 5]), np.arange(5), 1,
        x.numpy(), np.ones(5, np.float32), expected, np.zeros(form.width, np.float32), form,
    )  # fmt: skip
    assert np.abs(y.numpy() - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.fixture
def played(monkeypatch):
    """The command line's backend=cuda is on the played device."""
    made = kind()

    def found(name):
        assert name == "cuda"
        return made

    monkeypatch.setattr("oled.live.backends.kinds.backend_kind", found)
    return made


def test_oled_run_decodes_on_the_backend(played, tmp_path, capsys):
    words = ["run", "model=tiny", "backend=cuda", "policy=oled", "cache.slots=10", "limit=1"]
    assert main([*words, "decode.max_new_tokens=16", f"out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "decisions: the simulator's" in out
    assert "host store 12.0 MiB, pinned 12.0 MiB" in out  # the checkpoint's own bfloat16


def test_oled_run_replays_a_made_up_trace(played, tmp_path, capsys):
    words = ["run", "trace=synthetic", "trace.geometry=tiny", "trace.requests=1", "forwards=3"]
    timeline = tmp_path / "both.json"
    more = ["backend=cuda", "policy=lru", "cache.slots=10", f"timeline={timeline}"]
    assert main([*words, *more, f"out={tmp_path}"]) == 0
    assert "decisions: the simulator's" in capsys.readouterr().out
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert any(name.startswith("copy L") for name in names)


def test_oled_validate_runs_a_device_in_its_own_time(played, tmp_path, capsys):
    words = ["validate", "backend=cuda", "policies=[lru]", "cache.slots=20", "forwards=2"]
    assert main([*words, "repeats=1", "cost.geometry=tiny", f"out={tmp_path}"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["backend"] == "cuda"
    assert report["dilation"] == 1.0
    assert report["outputs_identical"]
    assert "Real lanes: Outputs count as identical" in capsys.readouterr().out


def test_what_the_device_says_in_many_lines_is_one_line(played, tmp_path, capsys, monkeypatch):
    def fail(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nOf 80 GiB ...")

    monkeypatch.setattr("oled.live.hooks.Offloaded.announce", fail)
    words = ["run", "model=tiny", "backend=cuda", "cache.slots=10", "limit=1"]
    assert main([*words, f"out={tmp_path}"]) == 1
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("oled: the device has no memory left: CUDA out of memory. Tried to")
