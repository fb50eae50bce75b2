"""Models decode with offloaded experts: the same tokens and logits as with all of them resident."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oled.errors import UserError
from oled.hardware import load_profile, load_runtime
from oled.live.backends.emulated import Emulated
from oled.live.decoded import LiveRun, simulate_run
from oled.live.experts import numbers_of, take_experts
from oled.live.run import Machine, live_run
from oled.live.store import Preflight, free_host_memory
from oled.policies.composition import load_composition
from oled.record import Autoregressive, BlockDiffusion, LoadedModel, load_model, plain_prompt
from oled.running.modules import moe_layers
from oled.sim.calibration import Calibration
from oled.sim.prepared import PreparedTrace
from oled.sim.settings import Settings
from oled.sim.timeline import LANES
from tests.live.build import RESIDENT
from tests.running.conftest import CONFIGS, build, tokenizer  # noqa: F401  (a fixture)

MACHINE = Machine(load_profile("rtx5090_xeon8470q"), load_runtime("graph_fused"))
PROMPTS = [
    plain_prompt("Question: Tom has 3 apples and buys 4 more. How many has he?\nAnswer:"),
    plain_prompt("Question: A car drives 60 miles in 2 hours. How fast is it?\nAnswer:"),
    plain_prompt("Question: Ann reads 5 pages a day. How many in a week?\nAnswer:"),
]
BLOCKS = BlockDiffusion(block_length=16, max_new_tokens=80, threshold=0.95)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


def difference(run: LiveRun, policy, slots, learned=None, **fields) -> str | None:
    """Where the decisions part from the simulator's."""
    settings = Settings(slots=slots, **fields)
    return simulate_run(run, load_composition(policy), settings, learned)[1]


def decode(
    loaded: LoadedModel, policy, slots, how=BLOCKS, prompts=PROMPTS, machine=MACHINE, **more
) -> tuple[LiveRun, list[bytes]]:
    """The run and the logits of all its forwards."""
    logits: list[bytes] = []
    head = loaded.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, __, out: logits.append(out.numpy().tobytes()))
    try:
        settings = Settings(slots=slots, staging=more.pop("staging", 8))
        composition = load_composition(policy)
        return live_run(loaded, prompts, how, composition, settings, machine, **more), logits
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def reference(tiny):
    return decode(tiny, RESIDENT, 128)


@pytest.mark.parametrize(
    ("policy", "slots", "staging", "prompts"),
    [
        ("oled", 10, 8, 3),
        ("lru", 0, 1, 1),
        ("naive_lru", 1, 1, 1),
        ("oled", 40, 2, 1),
        ("oled_layeradapt", 20, 8, 1),
        ("tide", 20, 8, 1),
        ("cpu_all", 10, 0, 1),
    ],
)
def test_tokens_and_logits_are_those_of_the_resident_model(
    tiny, reference, policy, slots, staging, prompts
):
    run, logits = decode(tiny, policy, slots, staging=staging, prompts=PROMPTS[:prompts])
    resident, resident_logits = reference
    assert len(run.passes) > 30 * prompts
    assert run.texts == resident.texts[:prompts]
    written = [done.shares[0].written for done in run.passes]
    assert written == [done.shares[0].written for done in resident.passes][: len(written)]
    assert logits == resident_logits[: len(logits)]
    assert difference(run, policy, slots, staging=staging) is None
    assert run.rates["accesses_all"] == run.steps.expert.size


def test_the_resident_executor_is_the_model(tiny, reference):
    """Our arithmetic beside transformers' own: the same text, logits to rounding."""
    fresh = load_model("tiny")
    logits = []
    head = fresh.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: logits.append(out))
    how = BLOCKS.resolve(fresh.model, fresh.tokenizer)
    from oled.running.prompts import tokenize

    for request in tokenize(PROMPTS[:1], fresh.tokenizer):
        for _ in how.decode(fresh.model, [request]):
            pass
    for plain, ours in zip(logits, reference[1], strict=False):
        there = torch.frombuffer(bytearray(ours), dtype=torch.float32).view_as(plain)
        torch.testing.assert_close(plain, there, atol=2e-3, rtol=1e-3)


def test_a_calibration_trace_serves_policies_that_learn(tiny, reference):
    learned = Calibration.from_steps(PreparedTrace.of("calibration").steps)
    run, logits = decode(tiny, "fiddler", 20, prompts=PROMPTS[:1], calibration=learned)
    assert logits == reference[1][: len(logits)]
    assert difference(run, "fiddler", 20, learned) is None
    with pytest.raises(UserError, match="'fiddler' needs a calibration trace"):
        decode(tiny, "fiddler", 20)
    with pytest.raises(UserError, match="'belady' needs the routing to come"):
        decode(tiny, "belady", 20)


@pytest.mark.parametrize("policy", ["hybrimoe", "promoe", "mrs_wide", "oled_fill", "saem"])
def test_policies_that_listen_or_copy_ahead_decode_the_same(tiny, reference, policy):
    """Router scores, next-gate predictions and prefetches, in a decoding that goes on."""
    learned = Calibration.from_steps(PreparedTrace.of("calibration").steps)
    run, logits = decode(tiny, policy, 20, prompts=PROMPTS[:2], calibration=learned)
    assert logits == reference[1][: len(logits)]
    assert difference(run, policy, 20, learned) is None
    needs = load_composition(policy).needs
    assert (run.steps.scores is not None) == ("scores" in needs)
    assert (run.steps.horizons == 3) == ("predictions" in needs)
    assert (len(run.link) > 0) == (policy != "mrs_wide")


def test_what_the_gates_say_live_is_what_a_recording_has(tiny, tmp_path):
    """Scores and predictions of the same prompt, recorded and heard live."""
    from oled.record import record
    from oled.trace import build_steps, load

    learned = Calibration.from_steps(PreparedTrace.of("calibration").steps)
    run, _ = decode(tiny, "hybrimoe", 128, prompts=PROMPTS[:1], calibration=learned)
    record(tiny, PROMPTS[:1], BLOCKS, tmp_path / "t", horizons=3, score_width=128)
    told = build_steps(load(tmp_path / "t"))
    assert told.num_steps == run.steps.num_steps
    np.testing.assert_array_equal(told.expert, run.steps.expert)
    np.testing.assert_allclose(told.scores, run.steps.scores, atol=1e-5)
    np.testing.assert_array_equal(told.pred_offsets, run.steps.pred_offsets)
    np.testing.assert_allclose(told.pred_score, run.steps.pred_score, atol=1e-4)


def test_both_sides_are_in_one_timeline(tiny, tmp_path):
    """The same lane names, dense parts as long, arrows from copies ahead to their use."""
    import gzip
    import json

    learned = Calibration.from_steps(PreparedTrace.of("calibration").steps)
    run, _ = decode(tiny, "promoe", 20, prompts=PROMPTS[:1], calibration=learned)
    settings = Settings(slots=20)
    replay, _ = simulate_run(run, load_composition("promoe"), settings, learned)
    file = run.write_timeline(tmp_path / "both.json.gz", "promoe", replay)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    sides = {1: "simulated: promoe", 2: "live: promoe"}
    for process, title in sides.items():
        mine = [event for event in events if event["pid"] == process]
        names = {e["args"]["name"] for e in mine if e.get("name") == "thread_name"}
        assert names == set(LANES)
        assert title in {e["args"]["name"] for e in mine if e.get("name") == "process_name"}
        words = {event["cat"] for event in mine if event["ph"] == "X"}
        assert {"dense", "hits", "landed", "copy", "prefetch"} <= words
        assert {"s", "f"} <= {event["ph"] for event in mine}
        assert {"resident experts L1", "link queue"} <= {e["name"] for e in mine if e["ph"] == "C"}
    dense = [[e["dur"] for e in events if e["pid"] == p and e.get("cat") == "dense"] for p in sides]
    assert len(dense[0]) == len(dense[1]) == run.steps.num_steps
    assert sum(dense[0]) == pytest.approx(sum(dense[1]), rel=0.8)


def test_paced_decoding_is_the_same(tiny, reference):
    machine = dataclasses.replace(MACHINE, paced=True)
    run, logits = decode(tiny, "oled", 20, prompts=PROMPTS[:1], machine=machine)
    assert logits == reference[1][: len(logits)]
    assert (run.forward_ns > 0).all()


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"diffusion_gemma"}))
def test_every_family_with_fused_experts_runs(family, tokenizer):  # noqa: F811
    prompts = [plain_prompt("one, two, three"), plain_prompt("a longer prompt of many bytes")]
    how = (
        BlockDiffusion(block_length=8, max_new_tokens=24, threshold=0.5)
        if family in ("llada2_moe", "sdar_moe")
        else Autoregressive(max_new_tokens=12, eos_ids=())
    )
    model = LoadedModel(family, build(family), tokenizer, torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([tokenizer("hello there")["input_ids"]])
        plain = model.model(ids).logits
    _, everything = decode(model, RESIDENT, 8, how, prompts)
    for policy, slots in (("lru", 0), ("naive_lru", 2), ("oled_exact", 3)):
        run, logits = decode(model, policy, slots, how, prompts)
        assert logits == everything
        assert difference(run, policy, slots) is None
    with torch.inference_mode():  # the model still has its experts: views of the store
        torch.testing.assert_close(model.model(ids).logits, plain, atol=1e-4, rtol=1e-4)


def test_experts_that_compute_something_else_are_refused(tokenizer):  # noqa: F811
    model = build("qwen3_moe")
    for entry in moe_layers(model):
        entry.experts.act_fn = torch.nn.GELU()
    with pytest.raises(UserError, match="computes something else than the gated layer"):
        take_experts(moe_layers(model))


def test_another_activation_is_refused():
    with pytest.raises(UserError, match="DiffusionGemmaTextExperts computes something else"):
        take_experts(moe_layers(build("diffusion_gemma")))


def test_half_precision_is_refused():
    model = build("qwen3_moe").to(torch.bfloat16)
    with pytest.raises(UserError, match="is in bfloat16: this backend computes in float32"):
        numbers_of(moe_layers(model), ("float32",))


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ("copy", OSError("the copy failed"), "the link lane failed: .*the copy failed"),
        ("fetch", OSError("the copy failed"), "the link lane failed: .*the copy failed"),
        ("compute_on_host", MemoryError("no more"), "the cpu lane failed: .*no more"),
        ("begin", KeyboardInterrupt(), None),  # Ctrl-C reaches the main thread
    ],
)
def test_a_failure_gives_the_model_back(tiny, monkeypatch, where, error, told):
    def fail(self, *_):
        raise error

    names = list(ALL_EXPERTS_FUNCTIONS)
    before = tiny.model.get_experts_implementation()
    learned = Calibration.from_steps(PreparedTrace.of("calibration").steps)
    expected = pytest.raises(KeyboardInterrupt) if told is None else pytest.raises(UserError)
    with monkeypatch.context() as patch, expected as raised:
        patch.setattr(Emulated, where, fail)
        decode(tiny, "hybrimoe", 10, calibration=learned)
    if told is not None:
        assert re.search(told, str(raised.value))
    assert list(ALL_EXPERTS_FUNCTIONS) == names
    assert tiny.model.get_experts_implementation() == before
    assert not [t for t in threading.enumerate() if t.name.startswith("oled-")]
    assert not any(m._forward_hooks for m in tiny.model.modules())  # the gates are let go, too


def test_the_store_holds_the_experts_once(tiny):
    """The modules' parameters are views of the store's block, and rows are contiguous experts."""
    layers = moe_layers(tiny.model)
    store = take_experts(layers)
    down = layers[0].experts.get_parameter("down_proj")
    assert down.data_ptr() >= store.block.ctypes.data
    assert down.data_ptr() < store.block.ctypes.data + store.block.nbytes
    assert store.block.nbytes == 4 * 128 * 3 * 128 * 32 * 4
    assert store.block.flags.c_contiguous


def test_preflight_refuses_before_anything_is_allocated(tiny, monkeypatch):
    import oled.live.run as module
    from oled.live.backends import kind

    monkeypatch.setattr(kind, "free_host_memory", lambda: 70 * 2**20)
    monkeypatch.setattr(module, "take_experts", lambda layers: pytest.fail("allocated"))
    with pytest.raises(UserError, match=r"needs 72\.2 MiB of host memory more") as told:
        decode(tiny, "lru", 10)
    assert "host store 24.0 MiB" in str(told.value)
    assert "70.0 MiB are free" in str(told.value)
    assert "fewer cache.slots" in str(told.value)


_PEAK = """
import torch
from transformers import AutoModelForCausalLM, MixtralConfig
from oled.live.experts import take_experts
from oled.live.kernels import warm
from oled.running.modules import moe_layers

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
config = MixtralConfig(vocab_size=64, hidden_size=128, intermediate_size=2048, num_hidden_layers=10,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)
layers = moe_layers(AutoModelForCausalLM.from_config(config).eval())
warm()
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
store = take_experts(layers)
print(store.block.nbytes, status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_taking_the_experts_needs_little_more_than_they_are():
    """G20: the store fills as the model's own copies go, a layer at a time."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True, timeout=300
    )
    size, growth = map(int, done.stdout.split())
    assert size == 10 * 8 * 3 * 128 * 2048 * 4
    assert growth < 0.25 * size  # one layer is a tenth


def test_preflight_counts_the_device_apart():
    plenty = 2**40
    Preflight(2**30, 2**30, 2**20, 2**20, plenty, plenty).check()
    with pytest.raises(UserError, match=r"slots need 1\.0 MiB of device memory, 0\.5 MiB are free"):
        Preflight(2**30, 2**30, 2**20, 2**20, plenty, 2**19).check()
    assert 0 < free_host_memory() < 2**50
