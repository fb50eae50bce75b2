"""What the routers of a decoding model say beside its routing, for policies that listen.

Shapes: T tokens, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from oled.record.capture import wanted
from oled.record.families import read_family
from oled.record.modules import MoeLayer
from oled.record.recorder import refuse_unknown_scores, router_stacks
from oled.record.scores import router_scores


class Said(NamedTuple):
    """Of one layer-step."""

    scores: NDArray[np.float32]  # [E of the widest layer] mean over the tokens, or [0]
    predictions: tuple[tuple[NDArray[np.uint16], NDArray[np.float32]], ...]
    """By layers ahead: experts and their summed weights, most wanted first, as in a trace."""


SILENCE = Said(np.zeros(0, np.float32), ())


class Gates:
    """A context: inside it, `take` what the router said that was asked last.

    `horizons`: the gates of the next 1.. MoE layers are asked about a layer's input, too.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[MoeLayer], *, scores: bool, horizons: int
    ) -> None:
        family = read_family(model.config)
        if scores:
            refuse_unknown_scores(family)
        self.horizons = min(horizons, len(layers) - 1)
        self._scoring = family.scoring if scores else None
        self._listens = scores or self.horizons > 0
        self._stacks = router_stacks(layers) if self._listens else []
        self._experts = [entry.num_experts for entry in layers]
        self._said = SILENCE
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            for stack in self._stacks:
                for row, router in enumerate(stack):
                    hook = self._hook(stack, row)
                    undo.callback(router.register_forward_hook(hook).remove)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def take(self) -> Said:
        """What was said since the last call."""
        said, self._said = self._said, SILENCE
        return said

    def _hook(self, stack: list[nn.Module], row: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            scores = SILENCE.scores
            if self._scoring is not None:
                values, _biased = router_scores(self._scoring, stack[row], output[0])
                scores = np.zeros(max(self._experts), np.float32)
                scores[: self._experts[row]] = values.mean(0).cpu().numpy()
            ahead = range(row + 1, min(row + 1 + self.horizons, len(stack)))
            asked = tuple(self._ask(stack[target], target, inputs[0]) for target in ahead)
            self._said = Said(scores, asked)

        return hook

    def _ask(self, router: Any, target: int, x: Tensor) -> tuple[Any, Any]:
        # forward, not __call__: its own hook must not take this for a real call
        _, weights, ids = router.forward(x)
        return wanted(ids.cpu().numpy(), weights.float().cpu().numpy(), self._experts[target])
