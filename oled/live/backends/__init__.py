"""What moves experts and computes them. A backend knows lanes and memory, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oled.errors import UserError
from oled.live.kernels import Ints


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
    hits: Ints  # positions on the device
    transfers: Ints  # positions, in order
    on_cpu: Ints  # positions
    free: list[int]  # slots that transfers may take at once
    released: list[int]  # slots that are free once the hits have computed
    begin: Any = None  # mark, see `oled.live.backends.lanes`
    landed: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (mark, position)
    vacant: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (mark, slot)


class Backend(Protocol):
    """Opened and closed as a context by the executor."""

    def open(self) -> None: ...

    def close(self) -> None:
        """End all lanes and give all memory back, whatever state they are in."""

    def place(self, row: int, slot: int) -> None:
        """Copy an expert now, outside any step: initial residents."""

    def host(self, nominal_ns: int) -> None:
        """The host's own section since the last step lasts `nominal_ns` (where time is kept)."""

    def catch_up(self) -> None:
        """The host was busy with something real: its section begins now."""

    def adopt(self, values: Any) -> Any:
        """An array of the host, or a tensor, as the lanes compute with it."""

    def run(self, work: LayerWork) -> Any:
        """The outputs [T, H], as `adopt` gives; returns when all lanes have done their part."""
