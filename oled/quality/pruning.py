"""Expansions of a layer's experts that can serve others, and projections refit to them.

The path from expansion i to expert j is judged by what it loses of j's output: on the inputs that a
calibration run routed to j, a projection is fitted by least squares to i's expansion so that it
gives j's weighted output, on every other token, and its squared error on the tokens between, over
the squared output, is the path's. A layer keeps the fewest expansions (greedily) such that every
expert has its own or one whose path stays below a tolerance; layers so prune themselves by what
they can bear. Experts that lost theirs get the projection fitted to the best that was kept, on all
tokens. *Reconstruction*: the paper's score, its pruning and whether it trains are not public.

Letters: N tokens of a layer, n of one expert, E experts, I width, H hidden size. Cost: E^2 n I H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from oled.altered.split.plan import PathPlan
from oled.errors import UserError
from oled.quality.heldout import answer_losses
from oled.running.decode import BlockDiffusion, Request
from oled.running.hooks import Compute, replace_experts
from oled.running.modules import MoeLayer, moe_layers
from oled.types import Ints

MOST_TOKENS = 8  # of one expert that are looked at, for each unit of its width
FEWEST_TOKENS = 2  # with fewer an expert keeps its own expansion
RIDGE = 1e-3  # of the mean square of an expansion's units


@dataclass(frozen=True, slots=True, eq=False)
class PrunedPaths:
    """Sources of all layers, and the projections of the experts that do not use their own."""

    plan: PathPlan
    projections: tuple[Tensor, ...]  # [L] of [followers, H, I], by ascending expert


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The inputs and routes of one layer in calibration."""

    hidden: Tensor  # [N, H]
    ids: Tensor  # [N, k]
    weights: Tensor  # [N, k]


def prune_paths(
    model: PreTrainedModel,
    requests: Sequence[Request],
    decode: BlockDiffusion,
    tolerance: float,
    *,
    seed: int = 0,
) -> PrunedPaths:
    """Prune by the answers of `requests`, masked as in the held-out loss; `decode` is resolved.

    tolerance: the most that a path may lose of its expert's squared output, 0 to 1.
    """
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance={tolerance}: it must be at least 0 and below 1")
    layers = moe_layers(model)
    seen = _calibrate(model, layers, requests, decode, seed)
    sources, projections, worst = [], [], []
    for entry, routed in zip(layers, seen, strict=True):
        experts = gated_experts(entry)
        errors = path_errors(experts, routed.hidden, routed.ids, routed.weights)
        source = choose_sources(errors, tolerance, int(routed.ids.shape[1]))
        followers = np.flatnonzero(source != np.arange(len(source)))
        fitted = [_fitted(experts, routed, int(source[j]), int(j)) for j in followers]
        shape = experts.get_parameter("down_proj").shape[1:]
        projections.append(torch.stack(fitted) if fitted else torch.zeros(0, *shape))
        sources.append(source)
        worst.append(float(errors[source[followers], followers].max(initial=0.0)))
    about = {
        "tolerance": tolerance,
        "calibration_prompts": len(requests),
        "worst_error": worst,
    }
    how = f"pruned at tolerance {tolerance:g}"
    return PrunedPaths(PathPlan(tuple(sources), how, about), tuple(projections))


def gated_experts(entry: MoeLayer) -> nn.Module:
    """Return the layer's experts. Raises UserError unless they are plain gated layers."""
    experts: Any = entry.experts
    plain = experts.has_gate and experts.is_concatenated
    if not plain or experts.has_bias or experts.is_transposed or experts.has_post_expert_norm:
        raise UserError(
            f"{entry.name}: {type(experts).__name__} is not a plain gated layer (gate, up and down "
            f"without biases); it can not be split"
        )
    return entry.experts


@torch.no_grad()
def path_errors(
    experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor
) -> NDArray[np.float64]:
    """Return the relative squared error [E, E] of paths from expansion i to expert j, or infinity.

    hidden: [N, H]; ids, weights: [N, k].
    """
    count, _, width = experts.get_parameter("down_proj").shape
    errors = np.full((count, count), np.inf)
    np.fill_diagonal(errors, 0.0)
    for expert in range(count):
        x, g = _inputs(expert, hidden, ids, weights, MOST_TOKENS * width)
        if len(x) < FEWEST_TOKENS * width:
            continue
        units = _expanded(experts, x) * g[:, None, None]  # [n, E, I]
        target = _output(experts, expert, x, g)
        fit, test = slice(0, None, 2), slice(1, None, 2)
        projection = _least_squares(units[fit], target[fit])  # [E, I, H]
        lost = torch.einsum("nei,eih->enh", units[test], projection) - target[test]
        relative = lost.square().sum((1, 2)).double() / target[test].double().square().sum()
        errors[:, expert] = relative.numpy()
        errors[expert, expert] = 0.0
    return errors


def choose_sources(errors: NDArray[np.float64], tolerance: float, fewest: int) -> Ints:
    """Return each expert's source [E]: of few expansions kept, the one with the least error.

    An expansion is kept if it serves the most experts that have none yet, the lowest id among
    equals, until all have one; then, if there are fewer than `fewest`, those that lose most.
    """
    serves = errors <= tolerance
    open_ = np.ones(len(errors), dtype=bool)
    kept = np.zeros(len(errors), dtype=bool)
    while open_.any():
        best = int(np.argmax(np.where(kept, -1, (serves & open_).sum(axis=1))))
        kept[best] = True
        open_ &= ~serves[best]
    while kept.sum() < fewest:
        loss = np.where(kept[:, None], errors, np.inf).min(axis=0)
        kept[int(np.argmax(np.where(kept, -1.0, loss)))] = True
    source = np.argmin(np.where(kept[:, None], errors, np.inf), axis=0)
    return np.where(kept, np.arange(len(errors)), source).astype(np.int64)


def _calibrate(
    model: PreTrainedModel,
    layers: Sequence[MoeLayer],
    requests: Sequence[Request],
    decode: BlockDiffusion,
    seed: int,
) -> list[_Seen]:
    """Return inputs and routes of every layer."""
    seen: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in layers]

    def watch(row: int, compute: Compute, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen[row].append((hidden.detach().cpu(), ids.cpu(), weights.detach().cpu()))
        return compute(hidden, ids, weights)

    with replace_experts(layers, watch):
        answer_losses(model, requests, decode, seed=seed)
    return [_Seen(*map(torch.cat, zip(*passes, strict=True))) for passes in seen]


def _inputs(
    expert: int, hidden: Tensor, ids: Tensor, weights: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Return inputs [n, H] and weights [n] of an expert's tokens, at most `most`, evenly spread."""
    token, slot = torch.where(ids == expert)
    if len(token) > most:
        chosen = torch.linspace(0, len(token) - 1, most).long()
        token, slot = token[chosen], slot[chosen]
    return hidden[token], weights[token, slot]


def _expanded(experts: Any, x: Tensor, only: int | None = None) -> Tensor:
    """Return units [n, E, I] of all experts for inputs [n, H], or of one expert [n, 1, I]."""
    both = experts.gate_up_proj if only is None else experts.gate_up_proj[only : only + 1]
    gate, up = torch.einsum("nh,euh->neu", x, both.to(x)).chunk(2, dim=-1)
    units: Tensor = experts.act_fn(gate) * up
    return units


def _output(experts: Any, expert: int, x: Tensor, g: Tensor) -> Tensor:
    """Return what an expert adds [n, H] to the layer's output for its tokens."""
    units = _expanded(experts, x, expert)[:, 0]
    output: Tensor = (units @ experts.down_proj[expert].to(x).T) * g[:, None]
    return output


def _least_squares(units: Tensor, target: Tensor) -> Tensor:
    """Return the projection [E, I, H] of each expansion's units [n, E, I] to target [n, H]."""
    gram = torch.einsum("nei,nej->eij", units, units).double()
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] + torch.finfo(gram.dtype).tiny
    ridge = RIDGE * scale * torch.eye(units.shape[-1], dtype=gram.dtype)
    mixed = torch.einsum("nei,nh->eih", units, target).double()
    projection: Tensor = torch.linalg.solve(gram + ridge, mixed)
    return projection.to(units)


@torch.no_grad()
def _fitted(experts: nn.Module, seen: _Seen, source: int, expert: int) -> Tensor:
    """Return the projection [H, I] that gives `expert`'s output from the expansion of `source`."""
    x, g = _inputs(expert, seen.hidden, seen.ids, seen.weights, len(seen.hidden))
    units = _expanded(experts, x, source) * g[:, None, None]
    fitted = _least_squares(units, _output(experts, expert, x, g))[0]
    return fitted.T.contiguous()
