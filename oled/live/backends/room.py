"""Where a layer-step's activations are on a device, and the jobs that a stream runs on them.

A job may run long after it was made: it holds what it needs, and the room is one step's until that
has ended. Letters as in `oled.live.backends.products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from oled.live.backends import products
from oled.live.backends.device import Device
from oled.live.kernels import ExpertForm
from oled.types import Ints

Job = Callable[[], object]


class Room:
    """Rows are pairs, those of an expert one behind the other. It grows as needed."""

    def __init__(self, device: Device, form: ExpertForm, dtype: torch.dtype) -> None:
        self._device, self._form, self._dtype = device, form, dtype
        self.empty()

    def empty(self) -> None:
        """Give the memory back."""
        self._make(0, 0)

    def _make(self, pairs: int, tokens: int) -> None:
        device, dtype, hidden = self._device, self._dtype, self._form.hidden
        self._pairs = device.tensor((pairs,), torch.int64)  # of each row
        self._x = device.tensor((pairs, hidden), dtype)
        self._between = device.tensor((pairs, 2 * self._form.width), dtype)
        self._y = device.tensor((pairs, hidden), dtype)  # not weighted yet
        self._sums = device.tensor((pairs, hidden), torch.float32)  # weighted, in order of pairs
        self._pairs_host = device.host_tensor((pairs,), torch.int64)
        self._x_host = device.host_tensor((tokens, hidden), dtype)
        self._y_host = device.host_tensor((pairs, hidden), dtype)
        self._used = 0

    def gather(self, pairs: Ints, x: Tensor, top_k: int) -> Job:
        """A step begins: its inputs x [T, H] by row. pairs i64[n], n <= T * k: the pair of each."""
        used, room = len(pairs), len(x) * top_k
        if room > len(self._y) or len(x) > len(self._x_host):
            self._make(max(room, len(self._y)), max(len(x), len(self._x_host)))
        self._used = used
        with torch.inference_mode():  # in which it may have been made
            self._pairs_host[:used] = torch.from_numpy(pairs)
        mine, host, rows = self._pairs[:used], self._pairs_host[:used], self._x[:used]

        def job() -> None:
            mine.copy_(host, non_blocking=True)
            rows.copy_(x.index_select(0, mine // top_k))

        return job

    def compute(
        self, experts: Sequence[Tensor], first: Sequence[int], counts: Sequence[int]
    ) -> Job:
        """One launch group: expert i, [S], for `counts[i]` rows from `first[i]` on."""
        runs = list(_runs(first, counts))
        x, between, y, form = self._x, self._between, self._y, self._form

        def job() -> None:
            for which, begin, end in runs:
                rows = slice(begin, end)
                weights, shares = [experts[i] for i in which], [counts[i] for i in which]
                products.compute(weights, shares, x[rows], between[rows], y[rows], form)

        return job

    def add(self, weight: Tensor, top_k: int, out: Tensor) -> Job:
        """The step's outputs [T, H]: a token's pairs in their order, whatever was computed first.

        weight [T * k]; pairs of unused slots add nothing.
        """
        mine, y = self._pairs[: self._used], self._y[: self._used]
        sums = self._sums[: len(out) * top_k]

        def job() -> None:
            if len(mine) < len(sums):
                sums.zero_()
            sums[mine] = y.float() * weight[mine].float()[:, None]
            out.copy_(sums.view(len(out), top_k, -1).sum(1))

        return job

    def activations_out(self, x: Tensor) -> Job:
        """x [T, H] to the host."""
        target = self._x_host[: len(x)]
        return lambda: target.copy_(x.to(target.dtype), non_blocking=True)

    def on_host(self, first: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
        """Inputs of `count` rows from `first` on, when activations are out; room for outputs."""
        tokens = self._pairs_host[first : first + count] // top_k
        return self._x_host.index_select(0, tokens), self._y_host[:count]

    def outputs_in(self, first: int, count: int) -> Job:
        """Outputs of the host's rows to the device."""
        source, target = self._y_host[:count], self._y[first : first + count]
        return lambda: target.copy_(source, non_blocking=True)


def _runs(first: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Experts whose rows follow one another: which, and their first and last row."""
    order = sorted(range(len(first)), key=lambda i: first[i])
    which: list[int] = []
    end = -1
    for i in order:
        if which and first[i] != end:
            yield which, first[which[0]], end
            which = []
        which.append(i)
        end = first[i] + counts[i]
    if which:
        yield which, first[which[0]], end
