"""A model whose routers follow a route-changing rule: the closed loop.

A forward hook on every router hands its output to the same functions that change the routes of a
trace, block by block, and passes on what they say. What the model then computes, decodes and caches
is its own under the rule; a recorder in the same forward sees the changed routes.

Letters: N tokens of a pass, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oled.altered.reroute import Reroute, RouteChange, Routed
from oled.altered.reroute.rerouter import BLOCK_PHASES, Rerouter
from oled.errors import UserError
from oled.running.alteration import Alteration, Group
from oled.running.decode import Pass
from oled.running.families import Scoring, read_family
from oled.running.hooks import hook_routers
from oled.running.modules import Stack, moe_layers, router_stacks
from oled.running.scores import router_scores
from oled.trace.schema import WeightKind


class Rerouting(Alteration):
    """Let the routers of `model` follow `rule`.

    `announce` (or `expect`) must be called with each pass before it runs.
    """

    def __init__(self, model: PreTrainedModel, rule: Reroute) -> None:
        family = read_family(model.config)
        if family.scoring in (None, Scoring.PROBABILITIES):
            raise UserError(
                f"'{family.model_type}': how its weights follow from the router's scores is not "
                f"known; its routes can not be changed"
            )
        self._scoring = family.scoring
        self._stacks = router_stacks(moe_layers(model))
        self._rerouter = Rerouter(
            rule, renormalise=family.weight_kind is not WeightKind.UNNORMALISED
        )
        self._tokens = 0
        self._groups: Sequence[Group] = ()

    @property
    def change(self) -> RouteChange:
        """Return what the rule has changed so far, compared with the same routers without it."""
        return self._rerouter.change

    @property
    def begins_with_masks(self) -> bool:
        """Return whether a block's first forward makes the pool of its later ones."""
        return self._rerouter.rule.keeps_pool

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(hook_routers(self._stacks, self._hook))

    def __str__(self) -> str:
        return str(self.change)

    def summary(self) -> dict[str, Any]:
        """Return what the rule has changed so far."""
        return {"rule": self.change.rule, **self.change.metrics()}

    def announce(self, coming: Pass) -> None:
        """Let the shares of a coming pass that belong to a block follow the rule."""
        groups = [
            (share.tokens, (share.request, share.block))
            for share in coming.shares
            if coming.phase in BLOCK_PHASES and share.block >= 0
        ]
        self.expect(coming.num_tokens, groups)

    def expect(self, tokens: int, groups: Sequence[Group]) -> None:
        """Let the groups of a coming pass of N = `tokens` tokens follow the rule."""
        self._tokens, self._groups = tokens, groups

    def _hook(self, stack: Stack, row: int) -> Callable[..., Any]:
        @torch.no_grad()
        def hook(router: Any, _: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> Any:
            if not self._groups:
                return None
            logits, weights, ids, *rest = output
            if len(ids) != self._tokens:
                raise UserError(f"a router saw {len(ids)} tokens of a pass of {self._tokens}")
            values, biased = router_scores(self._scoring, router, logits)
            new_ids, new_weights = self._route(row, ids, weights, values, biased)
            return (logits, new_weights, new_ids, *rest)

        return hook

    def _route(
        self, row: int, ids: Tensor, weights: Tensor, values: Tensor, biased: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ids and weights [N, k] under the rule, as tensors of the router's kinds."""
        old_ids, old_weights = ids.cpu().numpy().astype(np.int64), weights.float().cpu().numpy()
        scores = values.cpu().numpy()
        chosen_by = scores if biased is None else biased.cpu().numpy()
        new_ids, new_weights = old_ids.copy(), old_weights.copy()
        for tokens, block in self._groups:
            routed = Routed(old_ids[tokens], old_weights[tokens], scores[tokens], chosen_by[tokens])
            new_ids[tokens], new_weights[tokens] = self._rerouter.route(block, row, routed)
        return torch.from_numpy(new_ids).to(ids), torch.from_numpy(new_weights).to(weights)
