"""Predictors of routing that a recorder asks while a model runs.

Shapes: N tokens of a pass, h hidden size, E experts, m kept ids, L MoE layers. A *stack* is the
routers of all MoE layers, by row. A prediction is about the row so many MoE layers `ahead`;
counting goes on from the last layer to the first one of the next forward, so that `ahead` = L is
the same layer in the next forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from oled import paths
from oled.atomic import write_bytes
from oled.errors import UserError
from oled.running.families import Family, Scoring
from oled.running.modules import Stack
from oled.running.scores import router_scores

NEXT_GATE, FUTURE_ROUTER, SPICE = "next_gate", "future_router", "spice"
BUNDLED = "bundled"

Linear = tuple[Tensor, Tensor]
"""Weight [E, h] and bias [E]."""
LayerPrediction = tuple[int, Tensor, Tensor]
"""Layers ahead, ids [N, m] and values [N, m]."""


class Predictor(Protocol):
    """A predictor of routing: it predicts at every row of a stack, always the same rows ahead."""

    @property
    def name(self) -> str: ...

    def reach(self, layers: int) -> int:
        """Return how many MoE layers ahead it predicts at most, in a stack of so many rows."""
        ...

    def predict(self, stack: Stack, row: int, hidden: Tensor) -> Iterator[LayerPrediction]:
        """Predict other layers from the gate input `hidden` [N, h] of a row."""
        ...


@dataclass(frozen=True, slots=True)
class NextGate:
    """The gates of the next layers, asked about this layer's gate input."""

    horizons: int
    name: str = NEXT_GATE

    def reach(self, layers: int) -> int:
        return min(self.horizons, layers - 1)

    def predict(self, stack: Stack, row: int, hidden: Tensor) -> Iterator[LayerPrediction]:
        for ahead in range(1, min(self.horizons, len(stack) - 1 - row) + 1):
            # forward, not __call__: a recorder's hook must not take this for a real call
            _, weights, ids = stack[row + ahead].forward(hidden)
            yield ahead, ids, weights


@dataclass(frozen=True, slots=True, eq=False)
class RouterHeads:
    """Temporal and spatial router heads (arXiv 2609.04895): two linear layers for each row.

    `temporal[l]` says how row l will route in the next forward; `spatial[l]`, on the gate input of
    the row before (of the last row, for the first one of the next forward), how row l will route
    when it comes. Values are probabilities, of one choice for a softmax router, of E independent
    ones for a sigmoid router: the `width` best of each token.
    """

    temporal: tuple[Linear, ...]
    spatial: tuple[Linear, ...]  # may be none
    scoring: Scoring
    width: int
    name: str = FUTURE_ROUTER

    def reach(self, layers: int) -> int:
        return layers

    def predict(self, stack: Stack, row: int, hidden: Tensor) -> Iterator[LayerPrediction]:
        layers = len(stack)
        yield layers, *self._best(self.temporal[row], hidden)
        if self.spatial and layers > 1:
            yield 1, *self._best(self.spatial[(row + 1) % layers], hidden)

    def _best(self, head: Linear, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional.linear(hidden.float(), *head)
        sigmoid = self.scoring is Scoring.SIGMOID
        values = logits.sigmoid() if sigmoid else logits.softmax(-1)
        best = values.topk(min(self.width, values.shape[-1]), dim=-1)
        return best.indices, best.values


@dataclass(frozen=True, slots=True, eq=False)
class CrossLayerDrafts:
    """SPICE's look-ahead (arXiv 2608.21240) without its attention: z + B·A·z from layer to layer.

    `down[l]` A [r, h] and `up[l]` B [h, r] carry the gate input from row l to row l + 1, where the
    frozen router says what it would choose. Values are shares of the gate mass as expected: softmax
    of what selects, times `sharpness[ahead - 1]`; their sum over a token's k is the predicted mass.
    """

    down: tuple[Tensor, ...]
    up: tuple[Tensor, ...]
    sharpness: Tensor  # [L - 1]
    scoring: Scoring
    name: str = SPICE

    def reach(self, layers: int) -> int:
        return layers - 1

    def predict(self, stack: Stack, row: int, hidden: Tensor) -> Iterator[LayerPrediction]:
        z = hidden.float()
        for ahead in range(1, len(stack) - row):
            z = draft(z, self.down[row + ahead - 1], self.up[row + ahead - 1])
            logits, _, ids = stack[row + ahead].forward(z.to(hidden.dtype))
            chooses = selection(self.scoring, stack[row + ahead], logits)
            shares = (self.sharpness[ahead - 1] * chooses).softmax(-1)
            yield ahead, ids, shares.gather(-1, ids)


def draft(z: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return z + B·A·z for z [N, h]."""
    return z + z @ down.T @ up.T


def selection(scoring: Scoring | None, router: nn.Module, logits: Tensor) -> Tensor:
    """Return the values [N, E] that a router selects by: logits, or biased sigmoid scores."""
    if scoring is not Scoring.SIGMOID:
        return logits.float()
    values, biased = router_scores(scoring, router, logits)
    return values if biased is None else biased


def trained_predictors(
    source: str | Path, stack: Stack, family: Family, width: int, device: str | None = None
) -> tuple[Predictor, ...]:
    """Load the predictors in a file of heads, or the bundled ones; keep `width` scores a token.

    Temporal heads must be there, spatial ones and drafts may. `device`: where the model will be
    asked; None: where it is.

    Raises UserError where the file is none, or was trained for other routers than these.
    """
    path = heads_path(source)
    tensors, card = read_heads(path)
    if card["routers"] != fingerprint(stack):
        raise UserError(
            f"{path}: these heads were trained for another model; train them for this one with "
            f"experiments/training/train_predictors.py"
        )
    if family.scoring is None:
        raise UserError(f"how '{family.model_type}' scores experts is not known: do without heads")
    target, layers = device or next(stack[0].parameters()).device, len(stack)

    def tensor(name: str) -> Tensor:
        return tensors[name].float().to(target)

    def linear(kind: str) -> tuple[Linear, ...]:
        if f"{kind}.0" not in tensors:
            return ()
        return tuple((tensor(f"{kind}.{r}"), tensor(f"{kind}_bias.{r}")) for r in range(layers))

    heads = RouterHeads(linear("temporal"), linear("spatial"), family.scoring, width)
    if "sharpness" not in tensors:
        return (heads,)
    down, up = (
        tuple(tensor(f"{kind}.{row}") for row in range(layers - 1)) for kind in ("down", "up")
    )
    return heads, CrossLayerDrafts(down, up, tensor("sharpness"), family.scoring)


def heads_path(source: str | Path) -> Path:
    """Return the path of a file of heads; "bundled" is the bundled one."""
    return bundled_heads() if str(source) == BUNDLED else Path(source)


def bundled_heads() -> Path:
    """Return the path of the bundled model's heads."""
    return paths.model_path() / "heads.safetensors"


def fingerprint(modules: Stack) -> str:
    """Return a hash of routers or experts, by their weights in half precision."""
    digest = hashlib.sha256()
    for module in modules:
        for parameter in module.parameters(recurse=False):
            digest.update(parameter.detach().half().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_heads(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors by name, and the card: what they were trained for, on, and with what result."""
    try:
        with safe_open(path, framework="pt") as file:
            card = json.loads((file.metadata() or {})["card"])
            return {name: file.get_tensor(name) for name in file.keys()}, card  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: not a file of heads ({error}); "
            "make one with experiments/training/train_predictors.py"
        ) from error


def write_heads(path: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
    """Write tensors in half precision for `read_heads`."""
    halves = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(halves, metadata={"card": json.dumps(card)}))
