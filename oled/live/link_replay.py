"""The simulator's decisions, given what a live run's link did ahead between them.

Which copies have landed when a layer's routing becomes known is a matter of microseconds. So the
decisions of a policy that prefetches are compared with those that the simulator's functions make
from the same routing when the same pieces begin and cross between the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from oled.live.decider import Decider, prefetches
from oled.live.planlog import BEGAN, CROSSED, LinkLog, PlanLog, first_difference
from oled.policies.interface import At, Side
from oled.sim.prepare import Assembly
from oled.sim.state import Workload, step_of
from oled.trace.steps import Steps


class Beginning(NamedTuple):
    """A forward that begins."""

    at: At
    resets: bool  # residency and scores start afresh


def forwards_of(work: Workload, persistent: bool) -> Iterator[Beginning]:
    """The forwards of a workload in order."""
    request = -1
    for forward in range(work.request.size):
        first = work.request[forward] != request
        resets = first and (request < 0 or not persistent)
        request = work.request[forward]
        phase, block, step = work.phase[forward], work.block[forward], work.denoising_step[forward]
        yield Beginning(At(forward, phase, block, step, bool(first)), resets)


def difference(
    live: PlanLog,
    link: LinkLog,
    steps: Steps,
    simulated: PlanLog,
    ready: Assembly,
    side: Callable[[int], Side] | None = None,
) -> str | None:
    """Where the simulator's decisions part from the live ones, in words; None if nowhere.

    `simulated` is what it decided by itself; where the policy prefetches, its decisions under
    `link` count instead. `ready`: of `steps`, not run yet. `side`: what the prefetcher saw
    in a forward, if not all of `steps`.
    """
    if not prefetches(ready):
        return first_difference(live, simulated, steps)
    return difference_given(live, link, steps, ready, side)


def difference_given(
    live: PlanLog,
    link: LinkLog,
    steps: Steps,
    ready: Assembly,
    side: Callable[[int], Side] | None = None,
) -> str | None:
    """Where the decisions made under `link` part from the live ones; see `difference`."""
    decider, events = Decider(ready), _Events(link)
    work = ready.work
    for at, resets in forwards_of(work, ready.options.persistent):
        if resets:
            decider.begin_request()
            events.repeat(decider)
        decider.begin_forward(at)
        events.repeat(decider)
        seen = ready.side if side is None else side(at.forward)
        for index in range(work.step_offsets[at.forward], work.step_offsets[at.forward + 1]):
            step = step_of(work, index, at.forward)
            decider.decide(step)
            events.repeat(decider)
            decider.ask(step, seen)
            events.repeat(decider)
            decider.finish(step)
            events.repeat(decider)
        if events.difference is not None:
            return events.difference
    return first_difference(live, decider.log(), steps)


class _Events:
    """Lets a decider's link do what a live one did."""

    def __init__(self, link: LinkLog) -> None:
        self.difference: str | None = None
        self._left = list(reversed(link.tolist()))

    def repeat(self, decider: Decider) -> None:
        """What happened after the decider's last turn."""
        while self._left and self._left[-1][0] == decider.turn and self.difference is None:
            _, what, layer, expert = self._left.pop()
            if what == CROSSED:
                decider.crossed()
                continue
            room = 1 if what == BEGAN else layer
            crossing = decider.take(room)
            found = None if crossing is None else (crossing.layer, crossing.expert)
            wanted = (layer, expert) if what == BEGAN else None
            if found != wanted:
                self.difference = (
                    f"turn {decider.turn}: the live link began {_copy(wanted)}, the simulator's "
                    f"queue gives {_copy(found)}"
                )


def _copy(crossing: tuple[int, int] | None) -> str:
    if crossing is None:
        return "nothing"
    return f"expert {crossing[1]} of MoE layer {crossing[0]}"
