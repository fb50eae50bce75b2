"""The stop rule of drafts (DraftExpert, arXiv 2607.24434), and the set of experts it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oled.errors import UserError
from oled.running.decode.batch import Request
from oled.running.decode.common import require
from oled.types import Bools


@dataclass(frozen=True, slots=True)
class Drafting:
    """Settings of a draft: how far it goes ahead of the model.

    A drafted state is given up, and the draft ends, where its confidence is below `confidence`
    (tau) *and* verifying it would need more than `growth` experts, over all layers, that the states
    before it do not need (B, here the same for all states). Neither number is public.
    *Reconstruction*: a state's growth is known once the draft has run on it; the first state is
    where the model stands, so it is always verified. A verification has at most `most` states.
    """

    experts: str | None = "bundled"  # a file of draft experts; None: shared and best routed alone
    confidence: float = 0.8
    growth: int = 16
    most: int = 8

    def __post_init__(self) -> None:
        require(0 <= self.confidence <= 1, "draft.confidence", self.confidence, "in 0..1")
        require(self.growth >= 0, "draft.growth", self.growth, "0 or more")
        require(self.most >= 1, "draft.most", self.most, "at least 1")

    def stops(self, confidence: float, growth: int) -> bool:
        """Return whether a state of this confidence is not worth the experts that it adds."""
        return confidence < self.confidence and growth > self.growth


class VerifySet:
    """The experts that verifying the states of one draft is predicted to need."""

    def __init__(self, settings: Drafting) -> None:
        self._settings = settings
        self._experts: Bools | None = None  # [L, E], none before the first state

    def keeps(self, confidence: float, experts: Bools) -> bool:
        """Return whether the next state, which needs `experts` [L, E], is verified, too."""
        if self._experts is None:
            self._experts = experts
            return True
        growth = int((experts & ~self._experts).sum())
        if self._settings.stops(confidence, growth):
            return False
        self._experts = self._experts | experts
        return True


def refuse_batches(requests: Sequence[Request]) -> None:
    """Raise UserError for a batch: its rows would accept different numbers of steps."""
    if len(requests) > 1:
        raise UserError("drafts are verified one prompt at a time: use batch_size=1")
