"""What predictors learn from: gate inputs and routes of a model that decodes prompts.

Letters: L MoE layers, N tokens of all passes, h hidden size, k top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oled.record import Decoding, LoadedModel, Prompt
from oled.running.modules import moe_layers, router_stacks
from oled.running.prompts import tokenize


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The tokens of every pass, one after the other."""

    hidden: Tensor  # f16[L, N, h] gate inputs
    ids: Tensor  # i16[L, N, k]
    weights: Tensor  # f16[L, N, k] as applied
    following: Tensor  # i64[N] the token's place in the next pass, -1 if it has none there

    @property
    def followed(self) -> tuple[Tensor, Tensor]:
        """Places of the tokens that have a next pass, and their places there."""
        here = torch.nonzero(self.following >= 0)[:, 0]
        return here, self.following[here]


def routers_of(model: Any) -> list[nn.Module]:
    """The routers of all MoE layers."""
    (stack,) = router_stacks(moe_layers(model))
    return stack


def collect(loaded: LoadedModel, prompts: Sequence[Prompt], decode: Decoding) -> Features:
    """Decode the prompts, one after the other, and keep what the routers saw and said."""
    settings = decode.resolve(loaded.model, loaded.tokenizer)
    routers = routers_of(loaded.model)
    rows: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in routers]
    with ExitStack() as undo:
        for router, seen in zip(routers, rows, strict=True):
            undo.callback(router.register_forward_hook(_listener(seen)).remove)
        following = list(_following(loaded, prompts, settings))
    hidden, ids, weights = (
        torch.stack([torch.cat([one[part] for one in seen]) for seen in rows]) for part in range(3)
    )
    return Features(hidden, ids, weights, torch.from_numpy(np.concatenate(following)))


def _listener(seen: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        seen.append((inputs[0].half(), output[2].short(), output[1].half()))

    return hook


def _following(
    loaded: LoadedModel, prompts: Sequence[Prompt], settings: Decoding
) -> Iterator[np.ndarray]:
    """For every pass where its tokens are in the next one.

    A token is followed by the same position in the next pass of its block, and in autoregressive
    decoding by the token after it; nothing follows where a new block begins.
    """
    start = 0  # of the pass at hand, among the tokens of all
    for request in tokenize(prompts, loaded.tokenizer):
        before = np.zeros(0, np.int64)
        for done in settings.decode(loaded.model, [request]):
            now = done.shares[0].positions
            follows = len(now) == len(before) and now[0] - before[0] in (0, 1)
            yield start + np.arange(len(now)) if follows else np.full(len(before), -1)
            start, before = start + len(now), now
        yield np.full(len(before), -1)
