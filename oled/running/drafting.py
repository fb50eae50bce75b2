"""A model as its own draft: shared experts, the best routed expert and a small trained one.

Source: DraftExpert (arXiv 2607.24434, summaries). In each MoE layer a draft adds up the shared
experts, the routed expert of the largest gate weight (times that weight) and gamma times a small
expert that always stays on the GPU. What the routers choose meanwhile predicts the experts that the
model itself will need.

Letters: L MoE layers, N tokens of a pass, h hidden size, w width of a draft expert, E experts, k
top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from oled import paths
from oled.errors import UserError
from oled.running.alteration import Alteration
from oled.running.capture import wanted
from oled.running.hooks import Compute, replace_experts
from oled.running.modules import Stack, moe_layers, router_stacks
from oled.running.predictors import BUNDLED, fingerprint, read_heads
from oled.trace.schema import Prediction

DRAFT = "draft"
"""The predictor's name in a trace."""
SCRIPT = "experiments/training/train_draft_expert.py"


@dataclass(frozen=True, slots=True, eq=False)
class DraftExperts:
    """One SwiGLU of width w for each MoE layer, and what its output is multiplied with."""

    gate_up: tuple[Tensor, ...]  # [2w, h], gate rows first
    down: tuple[Tensor, ...]  # [h, w]
    gamma: Tensor  # [L]

    @property
    def width(self) -> int:
        return int(self.down[0].shape[1])

    def output(self, row: int, hidden: Tensor) -> Tensor:
        """Return the output of a row's draft expert for hidden [N, h]."""
        gate, up = functional.linear(hidden, self.gate_up[row]).chunk(2, dim=-1)
        return self.gamma[row] * functional.linear(functional.silu(gate) * up, self.down[row])

    def to(self, like: Tensor) -> DraftExperts:
        """Return a copy on the device and in the dtype of `like`."""
        return DraftExperts(
            tuple(tensor.to(like) for tensor in self.gate_up),
            tuple(tensor.to(like) for tensor in self.down),
            self.gamma.to(like),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as in a file."""
        found = {"gamma": self.gamma}
        for name, parts in (("gate_up", self.gate_up), ("down", self.down)):
            found |= {f"{name}.{row}": part for row, part in enumerate(parts)}
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> DraftExperts:
        """Build draft experts from `tensors()`."""
        rows = range(len(tensors["gamma"]))
        gate_up, down = (
            tuple(tensors[f"{name}.{row}"] for row in rows) for name in ("gate_up", "down")
        )
        return cls(gate_up, down, tensors["gamma"])


def bundled_drafts() -> Path:
    """Return the draft experts of the bundled model."""
    return paths.model_path() / "draft.safetensors"


def load_draft_experts(source: str | Path, stack: Stack) -> DraftExperts:
    """Load the draft experts in a file, or the bundled ones.

    Raises UserError where the file is none, or was trained for other routers than these.
    """
    path = bundled_drafts() if str(source) == BUNDLED else Path(source)
    try:
        tensors, card = read_heads(path)
    except UserError as error:
        raise UserError(
            f"{path}: not a file of draft experts; make one with {SCRIPT}, or do without: "
            f"decode.draft.experts=null"
        ) from error
    if card["routers"] != fingerprint(stack):
        raise UserError(
            f"{path}: these draft experts were trained for another model; train them for this one "
            f"with {SCRIPT}, or do without: decode.draft.experts=null"
        )
    return DraftExperts.of(tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The routers' choice in one draft pass: the experts that verifying its tokens will need."""

    flags: NDArray[np.bool_]  # [L, E]
    predictions: tuple[Prediction, ...]
    """Predictions for every layer, made at the last one: only then a draft is known to be kept."""


class Draft(Alteration):
    """Let a model compute as its draft does: one pass, then `wanted`.

    Without `experts` a draft has the shared and the best routed expert alone.
    """

    def __init__(self, model: PreTrainedModel, experts: str | Path | None) -> None:
        self.layers = moe_layers(model)
        stacks = router_stacks(self.layers)
        if len(stacks) != 1:
            raise UserError(
                "drafts need one stack of layers; this model has several: use a plain decode"
            )
        down = self.layers[0].experts.get_parameter("down_proj")  # of E experts, h x i or i x h
        hidden = model.config.get_text_config().hidden_size
        self._routed_width = int(down[0].numel() // hidden)
        self.experts = None
        if experts is not None:
            self.experts = load_draft_experts(experts, stacks[0]).to(down)
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}  # ids and weights [N, k] by row

    @property
    def units(self) -> int:
        """Return the width of a draft expert in units of a routed one."""
        width = 0 if self.experts is None else self.experts.width
        if width % self._routed_width:
            raise UserError(
                f"draft experts are {width} wide; it must be a multiple of the routed experts' "
                f"width, {self._routed_width}"
            )
        return width // self._routed_width

    def summary(self) -> dict[str, Any]:
        """Return the size of the draft experts."""
        return {"draft_experts": self.units}

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(replace_experts(self.layers, self._on_experts))

    def _on_experts(
        self, row: int, compute: Compute, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        self._chosen[row] = ids, weights
        best = weights.argmax(-1, keepdim=True)
        output = compute(hidden, ids.gather(-1, best), weights.gather(-1, best))
        return output if self.experts is None else output + self.experts.output(row, hidden)

    def wanted(self) -> Wanted:
        """Return which of the model's own experts the last pass predicts."""
        experts = [entry.num_experts for entry in self.layers]
        flags = np.zeros((len(experts), max(experts)), dtype=bool)
        found = []
        for row, (ids, weights) in sorted(self._chosen.items()):
            names, scores = wanted(
                ids.cpu().numpy().astype(np.int32), weights.float().cpu().numpy(), experts[row]
            )
            flags[row, names] = True
            last, layer = self.layers[-1].layer, self.layers[row].layer
            found.append(Prediction(DRAFT, last, layer, names, scores))
        return Wanted(flags, tuple(found))
