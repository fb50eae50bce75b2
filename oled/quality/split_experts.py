"""A model on its pruned paths: experts with another's expansion and a projection refit to it.

A path from expansion i to expert j computes what an expert with i's gate and up and j's refit down
computes, so the model's own weights are exchanged and everything else runs as it is: text, losses
and recordings are those of the paths. That an expansion is shared shows in what it costs, not in
what it computes.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oled.altered.split.plan import PathPlan
from oled.errors import UserError
from oled.quality.pruning import PrunedPaths, gated_experts
from oled.running.alteration import Alteration
from oled.running.modules import moe_layers


class SplitExperts(Alteration):
    """Let `model` compute by `paths`."""

    def __init__(self, model: PreTrainedModel, paths: PrunedPaths) -> None:
        layers = moe_layers(model)
        sizes = tuple(entry.num_experts for entry in layers)
        if tuple(map(len, paths.plan.sources)) != sizes:
            raise UserError("the paths are of a model with other layers or experts")
        self._experts: list[Any] = [gated_experts(entry) for entry in layers]
        self._paths = paths

    @torch.no_grad()
    def _install(self, installed: ExitStack) -> None:
        for experts, source, projection in zip(
            self._experts, self._paths.plan.sources, self._paths.projections, strict=True
        ):
            followers = torch.from_numpy(np.flatnonzero(source != np.arange(len(source))))
            sources = torch.from_numpy(source)[followers]
            for weights, new in (
                (experts.gate_up_proj, experts.gate_up_proj[sources]),
                (experts.down_proj, projection),
            ):
                installed.callback(_put, weights, followers, weights[followers].clone())
                _put(weights, followers, new)

    def __str__(self) -> str:
        return str(self._paths.plan)

    def summary(self) -> dict[str, Any]:
        """Return what is left of the experts."""
        plan = self._paths.plan
        return {
            "expansions": list(plan.expansions),
            "experts": [len(source) for source in plan.sources],
            "bytes_share": plan.bytes_share,
            "how": plan.how,
            **plan.about,
        }


@torch.no_grad()
def _put(weights: Tensor, rows: Tensor, values: Tensor) -> None:
    weights[rows.to(weights.device)] = values.to(weights)


def save_paths(paths: PrunedPaths, file: Path) -> Path:
    """Write sources and projections as one npz file."""
    arrays: dict[str, Any] = {"about": np.array(json.dumps([paths.plan.how, paths.plan.about]))}
    for layer, (source, projection) in enumerate(
        zip(paths.plan.sources, paths.projections, strict=True)
    ):
        arrays[f"source_{layer}"] = source
        arrays[f"projection_{layer}"] = projection.numpy()
    with file.open("wb") as data:
        np.savez(data, **arrays)
    return file


def load_paths(file: Path) -> PrunedPaths:
    """Load what `save_paths` wrote; nothing in it is executed."""
    try:
        with np.load(file, allow_pickle=False) as data:
            layers = range(sum(name.startswith("source_") for name in data.files))
            plan = PathPlan(
                tuple(data[f"source_{layer}"] for layer in layers),
                *json.loads(str(data["about"])),
            )
            projections = tuple(torch.from_numpy(data[f"projection_{layer}"]) for layer in layers)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{file}: no paths can be read from it ({error})") from None
    return PrunedPaths(plan, projections)
