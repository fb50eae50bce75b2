"""The executor in place of a model's experts: transformers dispatches to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from oled.errors import UserError
from oled.live.executor import Executor
from oled.live.gates import Gates
from oled.live.steplog import StepLog
from oled.policies.interface import At
from oled.running.decode import Pass
from oled.running.hooks import Compute, Hooks, replace_experts
from oled.running.modules import MoeLayer


class Offloaded(Hooks):
    """A context in which a model's routed experts are computed by `executor`.

    `announce` must be called with each pass before it runs and `finish` after it.
    """

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        executor: Executor,
        log: StepLog,
        gates: Gates,
    ) -> None:
        self.executor = executor
        self.log = log
        self.ask_ns: list[int] = []  # by forward: wall time of router scores and predictions
        self._gates = gates
        self._layers = layers
        self._next = 0

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(self.executor)
        installed.enter_context(self._gates)
        installed.enter_context(replace_experts(self._layers, self._on_experts))

    def announce(self, coming: Pass) -> None:
        """A pass is about to run: slots are allocated for it."""
        first = self.log.begin_forward(coming)
        share = coming.shares[0]
        if first:
            self.executor.begin_request()
        at = At(self.log.forward, int(coming.phase), share.block, share.step, bool(first))
        self.executor.begin_forward(at)
        self.ask_ns.append(0)
        self._next = 0

    def finish(self, done: Pass) -> None:
        if self._next != len(self._layers):
            raise UserError(f"{self._next} of {len(self._layers)} layers with experts have run")
        self.log.end_forward(done)

    def _on_experts(
        self, layer: int, _: Compute, hidden: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Compute a layer's experts by the executor. hidden [T, H], ids and weights [T, k]."""
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
        return torch.as_tensor(self.executor.run(step, side, routed, weight, x)).to(hidden.dtype)
