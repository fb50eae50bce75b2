"""The layer-steps of a live decoding, made as the trace makes them and kept for the simulator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.live.foresight import Foresight
from oled.live.gates import RouterOutput
from oled.policies.interface import Step
from oled.running.decode import Pass, Share
from oled.trace.kernels import aggregate, scratch_of
from oled.trace.schema import Geometry
from oled.trace.steps import Steps
from oled.types import Floats

_NO_FUTURE = np.zeros(0, np.int64)
_NOTHING_FORESEEN = np.zeros(0, np.float32)


class StepLog:
    """Builds one `Step` after the other, with the recorder's own code.

    A token's confidence is that of its position in the forward before: a policy that decides while
    a forward runs cannot know the forward's own. Where there is none yet it counts as 1.
    """

    def __init__(self, num_experts: NDArray[np.int64], top_k: int, foresight: Foresight) -> None:
        self.num_experts = num_experts
        self.foresight = foresight
        self._top_k = top_k
        self._passes: list[Pass] = []
        self._steps: list[Step] = []
        self._first_steps: list[int] = []
        self._confidence = np.zeros(0, np.float32)

    @property
    def forward(self) -> int:
        """Number of the forward that is running."""
        return len(self._passes) - 1

    def begin_forward(self, coming: Pass) -> bool:
        """Note the pass that is about to run; True for the first of its request."""
        if len(coming.shares) != 1:
            raise UserError("a live run decodes one prompt at a time: batch_size=1")
        share = coming.shares[0]
        first = not self._passes or self._passes[-1].shares[0].request != share.request
        if first:
            self._confidence = np.zeros(0, np.float32)
        self._passes.append(coming)
        self.foresight.begin_forward(share.request)
        self._first_steps.append(len(self._steps))
        room = int(share.positions[-1]) + 1 - self._confidence.size
        if room > 0:
            unknown = np.full(room, np.nan, np.float32)
            self._confidence = np.concatenate([self._confidence, unknown])
        return first

    def end_forward(self, done: Pass) -> None:
        """Note the confidences that the pass gave its tokens."""
        self._passes[-1] = done
        share = done.shares[0]
        self._confidence[share.positions] = share.confidence

    def step(
        self, layer: int, ids: NDArray[np.int32], weights: Floats, output: RouterOutput
    ) -> Step:
        """Return the layer-step of ids i32[T, k], weights f32[T, k] and the router output."""
        running = self._passes[-1]
        share = running.shares[0]
        expert, count, mass, last_token = self._aggregate(layer, ids, weights, share)
        step = Step(
            len(self._steps),
            self.forward,
            layer,
            int(running.phase),
            share.block,
            share.step,
            len(ids),
            len(self._steps) + 1,
            expert,
            count,
            mass,
            last_token,
            _NO_FUTURE,
            output.scores,
            self._coming(output, len(ids)),
        )
        self.foresight.add(output.predictions)
        self._steps.append(step)
        return step

    def _aggregate(
        self, layer: int, ids: NDArray[np.int32], weights: Floats, share: Share
    ) -> tuple[NDArray[np.uint16], NDArray[np.int32], Floats, NDArray[np.int32]]:
        """Return expert, count, mass and last_token of the active set, as in `Step`.

        Raises UserError for an id that the layer does not have.
        """
        room, tokens = min(ids.size, int(self.num_experts[layer])), len(ids)
        expert, count = np.empty(room, np.uint16), np.empty(room, np.int32)
        mass, last_token = np.empty((room, 4), np.float32), np.empty(room, np.int32)
        offsets = np.zeros(2, np.int64)
        row, slot = aggregate(
            np.zeros(1, np.int64),
            np.array([tokens]),
            np.zeros(1, np.int64),
            np.array([layer]),
            np.arange(tokens, dtype=np.uint16),
            ids.astype(np.uint16),
            weights,
            True,
            np.array([0, tokens]),
            share.state,
            self._confidence[share.positions],
            self.num_experts,
            0,
            offsets,
            expert,
            count,
            mass,
            last_token,
            *scratch_of(self.num_experts),
        )
        if row >= 0:
            raise UserError(f"token {row}, slot {slot}: layer {layer} routed an impossible expert")
        active = int(offsets[1])
        return expert[:active], count[:active], mass[:active], last_token[:active]

    def _coming(self, output: RouterOutput, tokens: int) -> Floats:
        """Return predictions for this layer in the next forward, f32[E] means over the tokens."""
        if self.foresight.horizons < self.foresight.layers:
            return _NOTHING_FORESEEN
        coming = np.zeros(int(self.num_experts.max()), np.float32)
        if self.foresight.layers in output.predictions:
            experts, scores = output.predictions[self.foresight.layers]
            coming[experts] = scores / tokens
        return coming

    def steps(self, expert_bytes: NDArray[np.int64]) -> Steps:
        """Everything so far as the simulator replays it."""
        shares = [done.shares[0] for done in self._passes]
        scores = [step.scores for step in self._steps]
        listened = bool(scores) and scores[0].size > 0
        offsets, expert, score = self.foresight.predictions
        asked = self.foresight.horizons > 0

        def column(values: list[int]) -> NDArray[np.int64]:
            return np.array(values, np.int64)

        return Steps(
            request=column([share.request for share in shares]),
            phase=column([int(done.phase) for done in self._passes]),
            block=column([share.block for share in shares]),
            step=column([share.step for share in shares]),
            tokens=column([len(share.positions) for share in shares]),
            context=column([share.context for share in shares]),
            accepted=column([int(share.accepted.sum()) for share in shares]),
            produced=column([share.produced for share in shares]),
            source=np.arange(len(shares)),
            step_offsets=column([*self._first_steps, len(self._steps)]),
            forward=column([step.forward for step in self._steps]),
            layer=column([step.layer for step in self._steps]),
            offsets=np.cumsum(column([0, *(step.expert.size for step in self._steps)])),
            expert=np.concatenate([np.zeros(0, np.uint16), *(s.expert for s in self._steps)]),
            count=np.concatenate([np.zeros(0, np.int32), *(s.count for s in self._steps)]),
            mass=np.concatenate([np.zeros((0, 4), np.float32), *(s.mass for s in self._steps)]),
            last_token=np.concatenate(
                [np.zeros(0, np.int32), *(s.last_token for s in self._steps)]
            ),
            num_experts=self.num_experts,
            expert_bytes=expert_bytes,
            top_k=self._top_k,
            scores=np.stack(scores) if listened else None,
            pred_offsets=offsets if asked else None,
            pred_expert=expert if asked else None,
            pred_score=score if asked else None,
            horizons=self.foresight.horizons,
        )


def empty_steps(geometry: Geometry) -> Steps:
    """A trace of this geometry with no forwards: what is known before decoding."""
    none = np.zeros(0, np.int64)
    return Steps(
        request=none,
        phase=none,
        block=none,
        step=none,
        tokens=none,
        context=none,
        accepted=none,
        produced=none,
        source=none,
        step_offsets=np.zeros(1, np.int64),
        forward=none,
        layer=none,
        offsets=np.zeros(1, np.int64),
        expert=np.zeros(0, np.uint16),
        count=np.zeros(0, np.int32),
        mass=np.zeros((0, 4), np.float32),
        last_token=np.zeros(0, np.int32),
        num_experts=np.array(geometry.experts_per_layer, np.int64),
        expert_bytes=np.array(geometry.expert_bytes, np.int64),
        top_k=geometry.top_k,
    )
