"""The contract of backends, which copy and compute experts and decide nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.types import Floats, Ints


class LaneError(UserError):
    """A lane failed; its own error is the cause. The run is over."""


@dataclass(slots=True, eq=False)
class LayerWork:
    """One decided layer-step. A positions of the active set; P pairs of token and slot."""

    forward: int
    layer: int
    tokens: int  # T without pads
    top_k: int
    x: Any  # [T, H], as the backend has it
    weight: Any  # [P]
    starts: Ints  # [A + 1] pairs of each position
    pairs: Ints  # [P]
    count: NDArray[np.int32]  # [A] tokens routed to the expert
    row: Ints  # [A] in the host store
    slot: Ints  # [A] on the device; the backend writes those of transfers
    stays: NDArray[np.bool_]  # [A] keeps its slot after the step
    prefetched: NDArray[np.bool_]  # [A] was prefetched and not used since
    hits: Ints  # positions on the device
    transfers: Ints  # positions, in order
    late: Ints  # positions of prefetches that have not landed yet
    on_cpu: Ints  # positions
    released: list[int]  # slots that are free once the hits have computed
    blocking: bool  # nothing overlaps
    out: list[tuple[int, int]]  # (slot, row) to copy back first; blocking only
    free: list[int] = field(default_factory=list)  # slots that transfers may take at once
    spare: int = 0  # more free slots, which prefetches may take
    copied: bool = False  # all transfers have been put on the link
    begin: Any = None  # mark, see `oled.live.backends.lanes`
    landed: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (mark, position)
    vacant: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (mark, slot)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a prefetch: numbers `first` to `last` of an expert's row."""

    row: int  # in the host store
    slot: int
    first: int
    last: int  # one past the last; the expert lands with the piece that ends its row
    nominal_ns: int
    forward: int  # the last one that began
    layer: int  # of the expert


class PrefetchFeed(Protocol):
    """Pieces for the link while no layer-step needs it. Called from the link's thread."""

    def next(self) -> Piece | None:
        """Return the next piece; None: there is nothing until `Backend.wake`."""

    def crossed(self, mark: Any) -> None:
        """Note that the last piece of `next` has crossed, at `mark`."""


class Backend(Protocol):
    """Opened and closed as a context by the executor."""

    now: int  # the actual end of the last section or step, ns
    entries: list[tuple[int, ...]]  # as in `oled.sim.timeline.Timeline`

    def open(self, prefetches: PrefetchFeed | None) -> None:
        """Allocate the slots and start the lanes. `prefetches`: None without prefetching."""

    def close(self) -> None:
        """End all lanes and give all memory back, whatever state they are in."""

    def place(self, row: int, slot: int) -> None:
        """Copy an expert now, outside any step: initial residents."""

    def host(self, kind: int, nominal_ns: int, forward: int, layer: int) -> None:
        """Let a section outside the experts last `nominal_ns`, where time is kept.

        `kind`: LOG_DENSE, LOG_POLICY or LOG_HEAD of `oled.sim.lanes`; layer -1 for the head.
        """

    def start(self) -> None:
        """Set the clock to the present; everything before took no time."""

    def catch_up(self, forward: int, layer: int) -> None:
        """Set the clock to the present; a real dense part took the time since `now`."""

    def note(self, kind: int, forward: int, layer: int, item: int) -> None:
        """Add an entry of no duration to the timeline, at `now`."""

    def take(self) -> tuple[int, Ints]:
        """Return the worst lateness of a lane against its own deadline, and the work of each lane
        (`oled.sim.lanes` GPU, H2D, D2H, CPU) i64[4], both since the last call; nanoseconds.
        """

    def wake(self) -> None:
        """Tell the link that there may be something to prefetch."""

    def settle(self) -> None:
        """Wait until it is known which prefetches have landed by `now`."""

    def drain(self) -> None:
        """Wait until the link is idle; it prefetches nothing until `wake`."""

    def adopt(self, values: Any) -> Any:
        """Return an array of the host, or a tensor, in the form that the lanes compute with."""

    def read(self, values: Any) -> Floats:
        """Wait for a result of `run` and return it on the host, in float32."""

    def run(self, work: LayerWork) -> Any:
        """Run the layer-step on all lanes and return the outputs [T, H], in the form of `adopt`."""
