"""What moves experts and computes them. A backend knows lanes and memory, and decides nothing."""

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
    ahead: NDArray[np.bool_]  # [A] was copied ahead and not used since
    hits: Ints  # positions on the device
    transfers: Ints  # positions, in order
    late: Ints  # positions on their way: copied ahead, not landed yet
    on_cpu: Ints  # positions
    released: list[int]  # slots that are free once the hits have computed
    blocking: bool  # nothing overlaps
    out: list[tuple[int, int]]  # (slot, row) to copy back first; blocking only
    free: list[int] = field(default_factory=list)  # slots that transfers may take at once
    spare: int = 0  # more free slots, which copies ahead may take
    begin: Any = None  # mark, see `oled.live.backends.lanes`
    landed: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (mark, position)
    vacant: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (mark, slot)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a copy that is made ahead: numbers `first` to `last` of an expert's row."""

    row: int  # in the host store
    slot: int
    first: int
    last: int  # one past the last; the expert lands with the piece that ends its row
    nominal_ns: int
    forward: int  # the last one that began
    layer: int  # of the expert


class Ahead(Protocol):
    """What the link copies while no layer-step wants it. Called from the link's thread."""

    def next(self) -> Piece | None:
        """What to copy now; None: nothing until `Backend.wake`."""

    def crossed(self, mark: Any) -> None:
        """The piece that `next` gave last has crossed, at `mark`."""


class Backend(Protocol):
    """Opened and closed as a context by the executor."""

    now: int  # the actual end of the last section or step, ns
    entries: list[tuple[int, ...]]  # as in `oled.sim.timeline.Timeline`

    def open(self, ahead: Ahead | None) -> None:
        """`ahead`: None where nothing is ever copied ahead."""

    def close(self) -> None:
        """End all lanes and give all memory back, whatever state they are in."""

    def place(self, row: int, slot: int) -> None:
        """Copy an expert now, outside any step: initial residents."""

    def host(self, kind: int, nominal_ns: int, forward: int, layer: int) -> None:
        """What comes between the experts of two layers lasts `nominal_ns` (where time is kept).

        `kind`: LOG_DENSE, LOG_POLICY or LOG_HEAD of `oled.sim.lanes`; layer -1 for the head.
        """

    def start(self) -> None:
        """What came before took no time: the clock goes on from here."""

    def catch_up(self, forward: int, layer: int) -> None:
        """The host was busy with something real, such as a dense part, until now."""

    def note(self, kind: int, forward: int, layer: int, item: int) -> None:
        """An entry of the timeline that takes no time, at the present moment."""

    def take(self) -> tuple[int, Ints]:
        """Since the last call: the worst lateness against a deadline of its own, and the work of
        each lane (`oled.sim.lanes` GPU, H2D, D2H, CPU), i64[4]; nanoseconds.
        """

    def wake(self) -> None:
        """There may be something to copy ahead."""

    def settle(self) -> None:
        """Returns when it is known what has crossed by now."""

    def drain(self) -> None:
        """Returns when nothing is on the link; nothing is copied ahead until `wake`."""

    def adopt(self, values: Any) -> Any:
        """An array of the host, or a tensor, as the lanes compute with it."""

    def read(self, values: Any) -> Floats:
        """What `run` gave, on the host and in float32, once it is computed."""

    def run(self, work: LayerWork) -> Any:
        """The outputs [T, H], as `adopt` gives; returns when all lanes have done their part."""
