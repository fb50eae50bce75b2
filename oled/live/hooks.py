"""The executor in place of a model's experts: transformers dispatches to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from oled.errors import UserError
from oled.live.executor import Executor
from oled.live.gates import Gates
from oled.live.steplog import StepLog
from oled.live.surrogates import Surrogates
from oled.policies.interface import At
from oled.running.decode import Pass
from oled.running.dispatch import dispatched, experts_of
from oled.running.modules import MoeLayer


class Offloaded:
    """A context in which a model's routed experts are computed by `executor`.

    `surrogates` replace experts whose misses are approximated; without them these add nothing.

    `announce` must be called with each pass before it runs and `finish` after it.
    """

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        executor: Executor,
        log: StepLog,
        gates: Gates,
        surrogates: Surrogates | None = None,
    ) -> None:
        self.executor = executor
        self.log = log
        self.ask_ns: list[int] = []  # by forward: wall time of router scores and predictions
        self._gates = gates
        self._surrogates = surrogates
        self._layers = layers
        self._rows: dict[nn.Module, int] = {
            experts: i for i, entry in enumerate(layers) for experts in experts_of([entry])
        }
        self._next = 0
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(self.executor)
            undo.enter_context(self._gates)
            undo.enter_context(dispatched(self._layers, self._on_experts))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def announce(self, coming: Pass) -> None:
        """A pass is about to run: slots are allocated for it."""
        first = self.log.begin_forward(coming)
        share = coming.shares[0]
        if first:
            self.executor.begin_request()
        at = At(self.log.forward, int(coming.phase), share.block, share.step, int(first))
        self.executor.begin_forward(at)
        self.ask_ns.append(0)
        self._next = 0

    def finish(self, done: Pass) -> None:
        if self._next != len(self._rows):
            raise UserError(f"{self._next} of {len(self._rows)} layers with experts have run")
        self.log.end_forward(done)

    def _on_experts(
        self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor, **_: Any
    ) -> Tensor:
        """What the dispatcher calls. hidden [T, H], ids and weights [T, k] -> [T, H]."""
        layer = self._rows[module]
        if layer != self._next:
            raise UserError(f"MoE layer {layer} ran where layer {self._next} was expected")
        self._next += 1
        backend, began = self.executor.backend, time.perf_counter_ns()
        backend.catch_up(self.log.forward, layer)
        x, weight = backend.adopt(hidden.detach()), backend.adopt(weights.detach())
        routed = ids.cpu().numpy().astype(np.int32)
        applied = weights.detach().float().cpu().numpy()
        output = self._gates.take()
        self.ask_ns[-1] += output.ask_ns
        step = self.log.step(layer, routed, applied, output)
        side = self.log.foresight.side(step.forward)
        self.executor.decide_ns[-1] += time.perf_counter_ns() - began
        out = torch.as_tensor(self.executor.run(step, side, routed, weight, x)).to(hidden.dtype)
        if self._surrogates is None or not self.executor.approximated.size:
            return out
        missing = torch.from_numpy(self.executor.approximated.astype(np.int64)).to(ids.device)
        added = self._surrogates.outputs(layer, missing, hidden.detach(), ids, weights.detach())
        return out + added.to(out.dtype)
