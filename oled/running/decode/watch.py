"""Watch a decoding loop: a pass that is not finite, or does not get on, ends it with an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Self

import numpy as np

from oled.errors import UserError
from oled.running.decode.batch import Pass, Share
from oled.trace.schema import Phase, TokenState

_DECIDING = (Phase.DENOISE, Phase.VERIFY)


class DecodingError(UserError):
    """Decoding can not go on. Forwards are counted as a trace counts them, from `decode` on."""

    def __init__(self, request: int, forward: int, place: str, problem: str) -> None:
        super().__init__(f"request {request}, forward {forward}{place}: {problem}")
        self.request, self.forward, self.place, self.problem = request, forward, place, problem

    def behind(self, forwards: int, consequence: str) -> Self:
        """Return the same error behind so many earlier forwards, and say what follows from it."""
        problem = f"{self.problem}; {consequence}"
        return type(self)(self.request, self.forward + forwards, self.place, problem)


def watch(
    passes: Iterator[Pass], *, most: int | None = None, must_open: bool = False
) -> Iterator[Pass]:
    """Yield the passes of a loop as long as they are sound.

    `most` is the number of deciding passes that a block may take (denoising or verifying),
    `must_open` whether each of them has to accept a token.

    Raises DecodingError for logits that are not finite, which have no greedy choice, and for a
    loop that would not end.
    """
    forward = 0
    taken: Counter[tuple[int, int]] = Counter()  # deciding passes by request and block
    for step in passes:
        for share in step.shares:
            _refuse_non_finite(step.phase, share, forward)
            if step.phase in _DECIDING:
                taken[share.request, share.block] += 1
                if must_open and not share.accepted.any():
                    raise _stuck(step.phase, share, forward, "the pass decides no token")
                if most is not None and taken[share.request, share.block] > most:
                    problem = f"the block is not decided after {most} passes, the most it may take"
                    raise _stuck(step.phase, share, forward, problem)
            forward += 1
        yield step


def _refuse_non_finite(phase: Phase, share: Share, forward: int) -> None:
    """Raise DecodingError for a confidence that is not finite: logits with NaN or infinity.

    A prefill has logits only where it decides; single logits of -inf, which forbid a token, do not
    count.
    """
    judged = share.accepted if phase is Phase.PREFILL else np.ones(len(share.positions), dtype=bool)
    wrong = np.flatnonzero(judged & ~np.isfinite(share.confidence))
    if len(wrong):
        place = f"{_detail(phase, share)}, position {share.positions[wrong[0]]}"
        problem = (
            "the model's output is not finite (NaN or infinity): check the checkpoint, or compute "
            "in a wider type (model.dtype=float32)"
        )
        raise DecodingError(share.request, forward, place, problem)


def _stuck(phase: Phase, share: Share, forward: int, problem: str) -> DecodingError:
    """Return the error of a share that does not get on, at its first undecided position."""
    masked = share.positions[(share.state == TokenState.MASKED) & ~share.accepted]
    place = f"{_detail(phase, share)}, position {[*masked, *share.positions][0]}"
    return DecodingError(share.request, forward, place, f"{problem}: decoding would not end")


def _detail(phase: Phase, share: Share) -> str:
    block = f", block {share.block}" if share.block >= 0 else ""
    step = f", step {share.step}" if share.step >= 0 else ""
    return f" ({phase.name.lower()}{block}{step})"
