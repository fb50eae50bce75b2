"""Forwards that pass hooks by: recorded rightly or refused, never recorded as something else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from oled.errors import UserError
from oled.record import Recorder
from oled.running.modules import moe_layers

from .conftest import VOCABULARY
from .test_recorder import TOKENS, router_outputs, run


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def test_a_fused_kernel_is_refused(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    experts = moe_layers(qwen)[1].experts
    experts.forward = lambda hidden, *_: torch.zeros_like(hidden)
    with Recorder(qwen) as recorder:
        run(qwen, ids)
        with pytest.raises(UserError, match=r"layer 2 .*fired 0 times.*2 of 3 layers"):
            recorder.take(TOKENS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_captured_block_is_refused(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    """Replayed as a graph, as CUDA graphs are: no Python runs, so nothing is seen."""
    block = qwen.model.layers[2].mlp
    with torch.no_grad():
        plain = run(qwen, ids)
        graph = torch.jit.trace(block, torch.randn(2, 12, 32), check_trace=False)
        block.forward = lambda hidden: graph(hidden)
        assert torch.equal(run(qwen, ids), plain)
        with Recorder(qwen, score_width=2) as recorder:
            run(qwen, ids)
            with pytest.raises(UserError, match=r"layer 2 .*fired 0 times"):
                recorder.take(TOKENS)


def test_a_compiled_layer_is_recorded_rightly(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    expected = router_outputs(qwen, ids)
    qwen.model.layers[2].mlp.compile(backend="eager")
    run(qwen, ids)  # compiled before there was a recorder
    with Recorder(qwen) as recorder:
        for _ in range(2):  # the second from the cache
            run(qwen, ids)
            capture = recorder.take(TOKENS)
            for row, (_, weights, experts) in enumerate(expected):
                assert np.array_equal(capture.expert_ids[row], experts.numpy())
                assert np.allclose(capture.weights[row], weights.numpy(), atol=1e-6)


def test_a_router_that_is_passed_by_is_refused(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    block = qwen.model.layers[1].mlp
    router = block.gate
    with Recorder(qwen, horizons=1) as recorder:
        block.gate = nn.Identity()
        block.gate.forward = router.forward  # routes alike, but is not the hooked module
        run(qwen, ids)
        with pytest.raises(UserError, match=r"layer 1 .*router fired 0 times"):
            recorder.take(TOKENS)


def test_forwards_that_nobody_took_are_refused(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    with Recorder(qwen) as recorder:
        run(qwen, ids)
        run(qwen, ids)
        with pytest.raises(UserError, match=r"layer 1 .*fired 2 times"):
            recorder.take(TOKENS)
        run(qwen, ids)
        recorder.take(TOKENS)


def test_a_forward_of_other_tokens_is_refused(qwen: PreTrainedModel, ids: torch.Tensor) -> None:
    with Recorder(qwen) as recorder:
        run(qwen, ids[:1])
        with pytest.raises(UserError, match="12 tokens of 24"):
            recorder.take(TOKENS)


def test_experts_that_are_not_dispatched_are_refused(qwen: PreTrainedModel) -> None:
    class OwnExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(8, 32, 16))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    qwen.model.layers[2].mlp.experts = OwnExperts()
    with pytest.raises(UserError, match=r"layers\.2\.mlp\.experts: OwnExperts does not dispatch"):
        Recorder(qwen)
