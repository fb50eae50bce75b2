"""The few calls of a CUDA device that the backend makes; tests put another in its place.

A stream runs what is put on it in order, some time after; an event is a place in a stream's order.
Nothing else orders two streams, or a stream and the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from oled.errors import UserError

_cuda: Any = torch.cuda  # of whose parts only some are typed


class Event(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None:
        """The calling thread waits."""

    def ns_since(self, earlier: Any) -> int:
        """Both are done."""


class Stream(Protocol):
    def put(self, job: Callable[[], object]) -> None:
        """Device work. It may run when `put` has returned: what it uses must stay as it is."""

    def wait(self, event: Any) -> None:
        """What is put from now on runs after `event`."""

    def mark(self) -> Event:
        """Done when all that was put is."""


class Device(Protocol):
    name: str
    place: str  # in torch's words, such as cuda:0

    def enter(self) -> None:
        """The calling thread works with this device from now on."""

    def compute_stream(self) -> Stream:
        """The stream on which the model's own layers run."""

    def stream(self) -> Stream: ...

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device; not cleared."""

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory for a few activations."""

    def pin(self, block: NDArray[Any]) -> None:
        """Pin a block where it lies, exactly; the same block any number of times."""

    def unpin(self, block: NDArray[Any]) -> None:
        """It stays pinned until it is unpinned as often as it was pinned."""

    def free_bytes(self) -> int: ...

    def synchronize(self) -> None:
        """The calling thread waits for all streams."""

    def captured(self, job: Callable[[], object]) -> Callable[[], object]:
        """The same work on the same memory as one launch, without gaps between its kernels."""

    def trim(self) -> None:
        """Give back memory that is not used any more."""


class CudaDevice:
    """The current CUDA device of torch."""

    def __init__(self) -> None:
        require_cuda()
        self._index = _cuda.current_device()
        self.name = _cuda.get_device_name(self._index)
        self.place = f"cuda:{self._index}"
        self._pinned: Counter[int] = Counter()  # by address

    def enter(self) -> None:
        _cuda.set_device(self._index)

    def compute_stream(self) -> Stream:
        return CudaStream(_cuda.current_stream(self._index))

    def stream(self) -> Stream:
        return CudaStream(_cuda.Stream(self._index))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.place)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, block: NDArray[Any]) -> None:
        """torch's own pinned memory is rounded up to powers of two; this is not."""
        address = block.ctypes.data
        if not self._pinned[address]:
            _check(_cuda.cudart().cudaHostRegister(address, block.nbytes, 0), block)
        self._pinned[address] += 1

    def unpin(self, block: NDArray[Any]) -> None:
        address = block.ctypes.data
        self._pinned[address] -= 1
        if not self._pinned[address]:
            _check(_cuda.cudart().cudaHostUnregister(address), block)

    def free_bytes(self) -> int:
        return int(_cuda.mem_get_info(self._index)[0])

    def synchronize(self) -> None:
        with device_failures():
            _cuda.synchronize(self._index)

    def captured(self, job: Callable[[], object]) -> Callable[[], object]:
        beside = _cuda.Stream(self._index)
        beside.wait_stream(_cuda.current_stream(self._index))
        with _cuda.stream(beside), torch.inference_mode():
            for _ in range(3):  # libraries choose their kernels outside the graph
                job()
        _cuda.current_stream(self._index).wait_stream(beside)
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph), torch.inference_mode():
            job()
        replay: Callable[[], object] = graph.replay
        return replay

    def trim(self) -> None:
        _cuda.empty_cache()


class CudaStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def put(self, job: Callable[[], object]) -> None:
        with _cuda.stream(self._stream), torch.inference_mode():  # as models decode in
            job()

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event.event)

    def mark(self) -> Event:
        event = _cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaEvent(event)


class CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def ns_since(self, earlier: Any) -> int:
        return int(earlier.event.elapsed_time(self.event) * 1e6)


def require_cuda() -> None:
    """Refuse where there is no device."""
    if not _cuda.is_available():
        raise UserError(
            f"backend=cuda: torch {torch.__version__} finds no CUDA device here; "
            f"backend=emulated needs none"
        )


@contextmanager
def device_failures() -> Iterator[None]:
    """What the device says in many lines, in one."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device has no memory left: {_first_line(error)}; take fewer cache.slots"
        ) from error
    except RuntimeError as error:
        if "CUDA" not in str(error):
            raise
        raise UserError(f"the device failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].removesuffix(".")


def _check(result: Any, block: NDArray[Any]) -> None:
    try:
        _cuda.check_error(result)
    except _cuda.CudaError as error:
        raise UserError(
            f"the host store of {block.nbytes / 2**20:,.1f} MiB can not be pinned or unpinned: "
            f"{error}; free host memory, or raise the memory limit of this process"
        ) from error
