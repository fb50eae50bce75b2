"""Kernels: the functions of a policy's parts, compiled one by one and called through a pointer.

Each kernel gets the structs of its role, then its part's memory and its part's hyper-parameters.
The driver knows neither the fields of a memory nor those of hyper-parameters: to it both are
addresses. A kernel is compiled for the fields of its own part, so their order means nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.policies.struct import Struct


class Memory(Struct):
    """What a part remembers between steps: arrays f64 first, then `Mutable` numbers, 0 at first.

    `cells` f64[n] is all of it in one vector; zeros there forget everything.
    """

    cells: ClassVar[NDArray[np.float64]]  # each instance has its own

    def __init__(self, **arrays: NDArray[np.float64]) -> None:
        fields = self.ref.fields
        numbers = {name: 0 for name, field in fields.items() if field.dtype is None}
        first = min((fields[name].offset for name in numbers), default=self._size)
        size = sum(array.size for array in arrays.values())
        self._make_buffer(8 * size)
        words = np.frombuffer(self._buffer, np.float64)
        views, begin = {}, self._size // 8
        for name, array in arrays.items():
            views[name] = words[begin : begin + array.size].reshape(array.shape)
            views[name][:] = array
            begin += array.size
        self._fill(views | numbers)
        self.__dict__["cells"] = words[first // 8 :]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remember, (type(self), self._asdict())


def _remember(kind: type[Memory], values: dict[str, Any]) -> Memory:
    numbers = {n: v for n, v in values.items() if kind.ref.fields[n].dtype is None}
    memory = kind(**{n: v for n, v in values.items() if n not in numbers})
    for name, value in numbers.items():
        setattr(memory, name, value)
    return memory


class NoMemory(Memory):
    """The memory of a part that keeps nothing."""


class Opaque(Struct):
    """Any struct, to a caller that does not know its fields."""

    @classmethod
    def of(cls, struct: Struct) -> Opaque:
        """Return the same address without fields."""
        opaque = cls()
        opaque.__dict__.update(address=struct.address, struct=struct)
        return opaque


class Role:
    """What kernels of one kind are given: structs, then the memory and hyper-parameters."""

    def __init__(self, name: str, *given: type[Struct]) -> None:
        self.name = name
        self.given = tuple(struct.ref for struct in given)
        self.signature = types.void(*self.given, Opaque.ref, Opaque.ref)
        self.pointer = types.FunctionType(self.signature)


class Kernel:
    """A part's function with the role that it plays."""

    def __init__(self, function: Callable[..., None], role: Role) -> None:
        self.function = function
        self.role = role
        functools.update_wrapper(self, function)

    def compiled(self, memory: Struct, params: Struct) -> Compiled:
        """Return its machine code for a part with these fields; cached on disk."""
        machine_code: Compiled = _compile(self, memory.ref, params.ref)
        return machine_code

    def __call__(self, *args: Any) -> None:
        """Run compiled; the last two arguments are memory and hyper-parameters."""
        self.compiled(*args[-2:])(*args)


class Compiled(types.WrapperAddressProtocol):  # type: ignore[misc]
    """A kernel's machine code: an argument for compiled drivers, and callable from Python."""

    def __init__(self, dispatcher: Any, role: Role) -> None:
        self._dispatcher = dispatcher  # owns the code
        self._role = role
        code = dispatcher.overloads[dispatcher.signatures[0]]
        name = code.fndesc.llvm_cfunc_wrapper_name
        self._address = int(code.library.get_pointer_to_function(name))
        addresses = [ctypes.c_void_p] * len(role.signature.args)
        self._call = ctypes.CFUNCTYPE(None, *addresses)(self._address)

    def __wrapper_address__(self) -> int:
        return self._address

    def signature(self) -> Any:
        return self._role.signature

    def __call__(self, *args: Struct) -> None:
        self._call(*(arg.address for arg in args))


@functools.cache
def _compile(kernel: Kernel, memory: Any, params: Any) -> Any:
    if numba.config.DISABLE_JIT:
        return kernel.function
    signature = types.void(*kernel.role.given, memory, params)
    dispatcher = bare_njit(signature, no_cpython_wrapper=True)(kernel.function)
    return Compiled(dispatcher, kernel.role)


def kernel(role: Role) -> Callable[[Callable[..., None]], Kernel]:
    """Mark a function as a compiled kernel of a role (OBSERVE, DISPATCH, ...)."""

    def mark(function: Callable[..., None]) -> Kernel:
        return Kernel(function, role)

    return mark
