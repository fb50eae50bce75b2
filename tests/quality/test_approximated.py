"""Misses that are given up while a model decodes: what stands in for them, and what becomes of
logits and text."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from oled.errors import UserError
from oled.live.run import live_run
from oled.live.run_trace import run_trace
from oled.live.surrogates import Surrogates
from oled.policies.composition import load_composition
from oled.policies.interface import DROPPED
from oled.quality.approximated import NOTHING, SURROGATES, Exact, approximations, comparable
from oled.record import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    LoadedModel,
    Mode,
    plain_prompt,
)
from oled.running.hooks import replace_experts
from oled.running.modules import experts_of, moe_layers
from oled.running.predictors import fingerprint, write_heads
from oled.running.prompts import tokenize
from oled.running.teacher_forcing import TeacherForcing, open_positions, output_tokens
from oled.sim.settings import Settings
from tests.live.test_run import MACHINE, difference
from tests.running.conftest import build, tokenizer  # noqa: F401  (a fixture)

HIDDEN, EXPERTS, RANK = 32, 8, 3
PROMPTS = [
    plain_prompt("one, two, three", " four, five, six"),
    plain_prompt("a longer prompt of many bytes", " with an answer"),
]
DECODES = {
    "llada2_moe": BlockDiffusion(block_length=8, max_new_tokens=24, threshold=0.5),
    "qwen3_moe": Autoregressive(max_new_tokens=12),
}


def policy(share: float):
    """LRU that gives up misses of this share of the gate mass, and follows no predictor."""
    dispatch = {"_target_": "oled.policies.dispatch.approximate.Approximate", "share": share}
    return load_composition(
        {
            "name": "gives_up",
            "description": "a test's",
            "retention": {"_target_": "oled.policies.retention.lru.Lru"},
            "dispatch": dispatch,
            "admission": "demand",
        }
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(DECODES))
def bench(request, tokenizer, tmp_path):  # noqa: F811
    """A model, its loop, and a file of random surrogates."""
    model = build(request.param)
    layers = moe_layers(model)
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for row in range(len(layers)):
        for kind, shape in (("down", (RANK, HIDDEN)), ("up", (HIDDEN, RANK))):
            values = torch.randn(EXPERTS, *shape, generator=generator)
            tensors[f"surrogate_{kind}.{row}"] = 0.2 * values
    file = tmp_path / "heads.safetensors"
    write_heads(file, tensors, {"routers": "", "experts": fingerprint(experts_of(layers))})
    loaded = LoadedModel(request.param, model, tokenizer, torch.float32)
    return loaded, DECODES[request.param], file


def live(bench, composition, decode=None, stand_in=True, slots=1, prompts=PROMPTS):
    loaded, own, file = bench
    known = (composition, Settings(slots=slots), MACHINE)
    return live_run(loaded, prompts, decode or own, *known, heads=file, stand_in=stand_in)


def along(bench, run, composition, **more):
    """Log-probabilities of the run's passes, once more under a policy."""
    _, decode, _ = bench
    passes: dict[int, list] = {}
    for done in run.passes:
        passes.setdefault(done.shares[0].request, []).append(done)
    block = 1 if isinstance(decode, Autoregressive) else decode.block_length
    loop = TeacherForcing(passes, block, decode.max_new_tokens)
    again = live(bench, composition, loop, **more)
    return again, torch.cat(loop.log_probabilities)


def test_what_surrogates_add_by_definition(bench):
    loaded, _, file = bench
    layers = moe_layers(loaded.model)
    made = Surrogates.load(file, layers, "cpu")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, HIDDEN, generator=generator)
    ids = torch.tensor([[0, 3], [3, 5], [1, 2], [7, 0], [5, 4], [6, 1]])
    weights = torch.rand(6, 2, generator=generator)
    found = made.outputs(1, torch.tensor([3, 7]), x, ids, weights)
    expected = torch.zeros(6, HIDDEN)
    for token, slot in ((0, 1), (1, 0), (3, 0)):
        expert = ids[token, slot]
        expected[token] = weights[token, slot] * (
            made.up[1][expert] @ made.down[1][expert] @ x[token]
        )
    torch.testing.assert_close(found, expected)
    assert made.bytes == 4 * 2 * len(layers) * EXPERTS * RANK * HIDDEN


@pytest.mark.parametrize("stand_in", [True, False])
def test_the_model_computes_what_was_decided(bench, stand_in):
    """Beside transformers' own kernels for the experts that were kept and plain products for the
    others, as the plan log names them."""
    loaded, _, file = bench
    run = live(bench, load_composition("lru"))
    again, heard = along(bench, run, policy(0.5), stand_in=stand_in)
    dropped = (again.plans.plans >> 2 & 3) == DROPPED
    assert 0.1 < dropped.mean() < 0.9
    assert again.rates["dropped_all"] == dropped.sum()
    layers = moe_layers(loaded.model)
    made = Surrogates.load(file, layers, "cpu")
    steps = itertools.count()

    def compute(row, _, hidden, ids, weights):
        step = next(steps)
        here = slice(*again.steps.offsets[step : step + 2])
        gone = torch.from_numpy(again.steps.expert[here][dropped[here]].astype(np.int64))
        lost = torch.isin(ids, gone)
        plain = layers[row].modules[0].plain_forward()
        out = plain(layers[row].experts, hidden, ids, weights.masked_fill(lost, 0.0))
        down, up = made.down[row][ids], made.up[row][ids]
        replaced = torch.einsum("tkhr,tkri,ti->tkh", up, down, hidden)
        return out + stand_in * (replaced * (weights * lost)[..., None]).sum(1)

    loop = TeacherForcing(
        {r: [p for p in run.passes if p.shares[0].request == r] for r in (0, 1)},
        1 if isinstance(bench[1], Autoregressive) else bench[1].block_length,
        0,
    )
    with replace_experts(layers, compute):
        for request in tokenize(PROMPTS, loaded.tokenizer):
            assert len(list(loop.decode(loaded.model, [request]))) == len(
                loop.passes[request.index]
            )
    torch.testing.assert_close(torch.cat(loop.log_probabilities), heard, atol=2e-3, rtol=1e-3)


def test_decisions_are_the_simulators(bench):
    run = live(bench, policy(0.5))
    assert run.rates["dropped"] > 0
    assert difference(run, policy(0.5), 1) is None
    assert run.surrogate_bytes > 0
    assert any("misses given up" in line for line in run.lines())


def test_passes_again_are_bitwise_those_of_the_first_time(bench):
    """Under every exact policy; and each pass decides what its own loop decided."""
    loaded, _, _ = bench
    run = live(bench, load_composition("lru"))
    _, heard = along(bench, run, load_composition("lru"))
    _, other = along(bench, run, load_composition("cpu_all"), slots=3)
    assert torch.equal(heard, other)
    lengths = [len(request.prompt) for request in tokenize(PROMPTS, loaded.tokenizer)]
    at = 0
    for index, length in enumerate(lengths):
        passes = [p for p in run.passes if p.shares[0].request == index]
        tokens = output_tokens(passes)
        chosen = heard.argmax(-1).tolist()
        for done, (_, positions) in zip(passes, open_positions(passes, length), strict=True):
            said = dict(zip(positions.tolist(), chosen[at : at + len(positions)], strict=True))
            at += len(positions)
            for position, token in done.shares[0].written:
                if position < length + len(tokens):
                    assert said[position] == token
    assert at == len(heard)


def judged(bench, composition, slots=1):
    loaded, decode, _ = bench

    def run(policy, loop, stand_in):
        return live(bench, policy, loop, stand_in, slots)

    free = run(composition, decode, True)
    return approximations(Exact.of(loaded, PROMPTS, decode, run), composition, run, free)


def test_a_policy_that_gives_nothing_up_changes_nothing(bench):
    found = judged(bench, policy(0.0))
    for one in found.values():
        assert one.kl_bits == 0.0
        assert one.dropped_gate_share == 0.0
        assert one.quality.same_choice == one.quality.same_tokens == 1.0
        assert one.quality.plain.bits == one.quality.altered.bits


def test_what_is_judged_by_definition(bench):
    """Against the distributions themselves; the truth is the reference answer and its end."""
    loaded, decode, _ = bench
    composition = policy(0.5)
    found = judged(bench, composition)
    forced = replace(decode.resolve(loaded.model, loaded.tokenizer), mode=Mode.FORCED)
    guide = live(bench, load_composition("lru"), forced)
    _, p = along(bench, guide, load_composition("lru"))
    for name, stand_in in ((SURROGATES, True), (NOTHING, False)):
        run, q = along(bench, guide, composition, stand_in=stand_in)
        one = found[name]
        kl = functional.kl_div(q.double(), p.double(), log_target=True, reduction="batchmean")
        assert one.kl_bits == pytest.approx(float(kl) / np.log(2))
        assert one.kl_bits > 0
        assert one.quality.same_choice == pytest.approx(
            float((p.argmax(-1) == q.argmax(-1)).double().mean())
        )
        truth = np.concatenate([a.truth for a in one.quality.altered.answered])
        wanted = tokenize(PROMPTS, loaded.tokenizer)
        known = set(np.concatenate([r.reference for r in wanted]).tolist()) | {0}
        assert set(truth.tolist()) <= known
        bits = -q.double()[torch.arange(len(truth)), torch.from_numpy(truth)].mean() / np.log(2)
        assert one.quality.altered.bits == pytest.approx(float(bits))
        assert one.dropped_gate_share == run.rates["dropped_gate_share"]
        assert "of the gate mass given up" in one.lines()[0]
        assert one.summary()["same_tokens"] == one.quality.same_tokens


def test_what_cannot_run_is_refused(bench, tmp_path):
    loaded, decode, _ = bench
    known = (decode, policy(0.5), Settings(slots=1), MACHINE)
    with pytest.raises(UserError, match="approximates misses: give heads=FILE"):
        live_run(loaded, PROMPTS, *known)
    empty, others = tmp_path / "empty", tmp_path / "others"
    write_heads(empty, {"temporal.0": torch.zeros(1)}, {"routers": ""})
    with pytest.raises(UserError, match="no surrogates of experts"):
        live_run(loaded, PROMPTS, *known, heads=empty)
    tensors = {"surrogate_down.0": torch.zeros(1)}
    write_heads(others, tensors, {"routers": "", "experts": "of another model"})
    with pytest.raises(UserError, match="made for other experts"):
        live_run(loaded, PROMPTS, *known, heads=others)
    with pytest.raises(UserError, match="random experts have nothing to stand in"):
        run_trace("demo", policy(0.5), Settings(slots=10), MACHINE.profile, MACHINE.runtime)
    with pytest.raises(UserError, match="needs prompts with reference answers"):
        comparable([plain_prompt("no answer")], decode)
    with pytest.raises(UserError, match="compares plain block diffusion or autoregressive"):
        comparable(PROMPTS, CanvasDiffusion())
    assert comparable(PROMPTS, decode) is decode
