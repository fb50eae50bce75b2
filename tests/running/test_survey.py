"""Every family with experts in the installed transformers: recorded exactly, or refused early."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from oled.errors import UserError
from oled.record import Autoregressive, LoadedModel, load_model, plain_prompt, record
from oled.running.modules import moe_layers
from oled.running.survey import families, refusal, tiny_config
from oled.trace.check import check
from oled.trace.reader import load
from oled.trace.schema import Phase

PROMPTS = [plain_prompt("How many pears?"), plain_prompt("Trip")]
REFUSED = {
    "dbrx": "fused",
    "inkling_text": "does not dispatch",
    "jetmoe": "fused",
    "llama4_text": "does not dispatch",
    "longcat_flash": "does not dispatch",
    "minimax": "a cache of its own",
}


def built(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    for name, buffer in model.named_buffers():
        if name.endswith(
            "tid2eid"
        ):  # DeepSeek-V4's experts by token id, zeros without a checkpoint
            first = torch.arange(len(buffer))[:, None]
            buffer.copy_((first + torch.arange(buffer.shape[1])) % 8)
    return model


@pytest.mark.parametrize("kind", families())
def test_every_family_is_recorded_exactly_or_refused(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    reason = refusal(kind)
    if kind in REFUSED:
        assert reason is not None
        assert REFUSED[kind] in reason
        return
    assert reason is None
    model = built(kind)
    received: dict[int, list[Any]] = defaultdict(list)

    def watch(layer: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            ids, weights = [*inputs, *named.values()][1:3]
            received[layer].append((ids.clone(), weights.clone()))

        return hook

    decode = Autoregressive(max_new_tokens=3, eos_ids=())
    loaded = LoadedModel(kind, model, tokenizer, torch.float32)
    with ExitStack() as hooks:
        for entry in moe_layers(model):
            hook = entry.experts.register_forward_pre_hook(watch(entry.layer), with_kwargs=True)
            hooks.callback(hook.remove)
        record(loaded, PROMPTS, decode, tmp_path / "t", batch_size=2)
    report = check(tmp_path / "t")
    assert report.ok, report.lines()
    trace = load(tmp_path / "t")
    assert trace.forwards.phase.tolist() == [Phase.PREFILL] * 2 + [Phase.DECODE] * 4
    assert trace.tokens.position.tolist() == [*range(15), *range(4), 15, 4, 16, 5]
    assert sorted(received) == list(trace.geometry.moe_layers)
    for layer, passes in received.items():
        rows = trace.routing.layer == layer
        for number, (ids, weights) in enumerate(passes[:3]):  # calibration runs some more
            longest = len(ids) // 2
            for request in range(2):
                here = rows & (trace.routing.forward == 2 * number + request)
                own = slice((request + 1) * longest - int(here.sum()), (request + 1) * longest)
                np.testing.assert_array_equal(trace.routing.expert_ids[here], ids[own])
                np.testing.assert_allclose(
                    trace.routing.weights[here], weights[own].float(), rtol=2e-3, atol=1e-6
                )


def test_most_families_are_recorded() -> None:
    known = families()
    assert set(REFUSED) <= set(known)
    assert len(known) - len(REFUSED) >= 52


@pytest.mark.parametrize("kind", ["minimax", "llama4_text", "jetmoe"])
def test_refusals_come_before_the_weights(kind: str, tmp_path: Path) -> None:
    """There are none in the folder, nor a tokenizer."""
    tiny_config(kind).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=REFUSED[kind]):
        load_model(str(tmp_path), "cpu")
