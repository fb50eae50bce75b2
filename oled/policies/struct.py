"""Named fields that Python and compiled code share: compiled code gets one address for all of them.

A tuple of arrays would be handed over word by word, a hundred words for a cache, in every call;
that took most of the time of compiling. A `Struct` packs its fields into a buffer instead: a number
is 8 bytes, an array the address of its data and its shape (it is C-contiguous).
`cache.score[layer, expert]` reads the same in Python, where it is an attribute, and in compiled
code, where it is a load.

Fields are fixed once the struct is made, so that compiled code may keep them in registers, except
those marked `Mutable[...]`: both sides write to these in the buffer.
"""

from __future__ import annotations

import ctypes
import hashlib
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import (
    NativeValue,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np import numpy_support
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

Item = TypeVar("Item", bound=np.generic)
Kind = TypeVar("Kind")

Vector = Annotated[NDArray[Item], 1]
Matrix = Annotated[NDArray[Item], 2]
Cube = Annotated[NDArray[Item], 3]
Mutable = Annotated[Kind, "mutable"]

_WORD = 8
_NUMBERS = {int: types.int64, float: types.float64, bool: types.boolean}


class Field(NamedTuple):
    """One field: where it lies in the buffer and how compiled code sees it."""

    name: str
    type: Any  # numba type
    dtype: np.dtype[Any] | None  # of an array
    offset: int  # bytes
    mutable: bool


class Ref(types.Type):  # type: ignore[misc]
    """The numba type of a struct: an address, and the fields found there."""

    def __init__(self, name: str, fields: tuple[Field, ...]) -> None:
        self.fields = {field.name: field for field in fields}
        digest = hashlib.sha256(repr([f[:2] + f[3:] for f in fields]).encode()).hexdigest()
        super().__init__(f"{name}_{digest[:8]}")


@dataclass_transform()
class Struct:
    """Base of all structs; a subclass lists its fields as annotations, like a dataclass.

    `class Step(Struct, mutable=True)`: every field can change.
    Raises TypeError for an array of another dtype or shape, or one that is not C-contiguous.
    """

    ref: ClassVar[Ref]
    address: ClassVar[int]  # of the buffer; each instance has its own
    _size: ClassVar[int]  # bytes
    _buffer: ClassVar[Any]
    _integers: ClassVar[Any]  # the buffer as i64 and as f64
    _floats: ClassVar[Any]

    def __init_subclass__(cls, mutable: bool = False) -> None:
        super().__init_subclass__()
        hints = typing.get_type_hints(cls, include_extras=True)
        fixed = {n: hint for n, hint in hints.items() if typing.get_origin(hint) is not ClassVar}
        cls._lay_out(fixed, mutable)

    @classmethod
    def _lay_out(cls, hints: Mapping[str, Any], mutable: bool) -> None:
        fields, offset = [], 0
        for name, hint in hints.items():
            field = _field(name, hint, offset, mutable)
            fields.append(field)
            offset += _WORD * (1 + getattr(field.type, "ndim", 0))
            if field.mutable and field.dtype is None:
                setattr(cls, name, _number_in_buffer(field))
        cls.ref = Ref(cls.__name__, tuple(fields))
        cls._size = max(_WORD, offset)

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = self.ref.fields
        if len(values) > len(fields):
            raise TypeError(f"{type(self).__name__} has {len(fields)} fields")
        given = dict(zip(fields, values, strict=False))
        if named.keys() & given.keys() or len(given) + len(named) != len(fields):
            raise TypeError(f"{type(self).__name__} takes each once: {', '.join(fields)}")
        self._make_buffer()
        self._fill(given | named)

    def _make_buffer(self, extra: int = 0) -> None:
        own = self.__dict__
        own["_buffer"] = buffer = ctypes.create_string_buffer(self._size + extra)
        own["address"] = ctypes.addressof(buffer)
        own["_integers"] = memoryview(buffer).cast("B").cast("q")
        own["_floats"] = memoryview(buffer).cast("B").cast("d")

    def _fill(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._store(self.ref.fields[name], value)

    def _store(self, field: Field, value: Any) -> None:
        at = field.offset // _WORD
        if field.dtype is not None:
            if (
                value.dtype != field.dtype
                or value.ndim != field.type.ndim
                or not value.flags.c_contiguous
            ):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} is {value.dtype}[{value.ndim}d]; it must "
                    f"be a contiguous {field.dtype}[{field.type.ndim}d]"
                )
            self._integers[at] = value.__array_interface__["data"][0]
            for axis, size in enumerate(value.shape):
                self._integers[at + 1 + axis] = size
        elif isinstance(field.type, Ref):
            self._integers[at] = value.address
        elif field.type is types.float64:
            self._floats[at] = value = np.float64(value)  # meets single precision as compiled
        else:
            self._integers[at] = value = int(value)
            value = bool(value) if field.type is types.boolean else value
            if field.mutable:
                return
        self.__dict__[field.name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.ref.fields.get(name)
        if field is None or not field.mutable:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set")
        self._store(field, value)

    def _asdict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.ref.fields}

    def _replace(self, **changes: Any) -> Self:
        """Return a struct with these fields in place of its own."""
        return type(self)(**(self._asdict() | changes))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._asdict().values())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._asdict().values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._asdict()})"


def struct_of_numbers(name: str, kinds: Mapping[str, type]) -> type[Struct]:
    """Return a new class of structs with these fields, each int, float or bool."""
    return type(name, (Struct,), {"__annotations__": dict(kinds), "__module__": __name__})


def _field(name: str, hint: Any, offset: int, mutable: bool) -> Field:
    """Return the field of an annotation: a number, an array of known shape, or a struct."""
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)  # type: ignore[assignment]
    mutable |= "mutable" in marks
    dimensions = [mark for mark in marks if isinstance(mark, int)]
    if dimensions:
        dtype = np.dtype(typing.get_args(typing.get_args(hint)[1])[0])
        array = types.Array(numpy_support.from_dtype(dtype), dimensions[0], "C")
        return Field(name, array, dtype, offset, mutable)
    if isinstance(hint, type) and issubclass(hint, Struct):
        return Field(name, hint.ref, None, offset, False)
    if hint not in _NUMBERS:
        raise TypeError(f"field '{name}' is {hint}; it is a number, an array or a struct")
    return Field(name, _NUMBERS[hint], None, offset, mutable)


def _number_in_buffer(field: Field) -> property:
    at, kind = field.offset // _WORD, field.type

    def read(self: Struct) -> Any:
        if kind is types.float64:
            return np.float64(self.__dict__["_floats"][at])
        value = self.__dict__["_integers"][at]
        return bool(value) if kind is types.boolean else value

    return property(read)


@typeof_impl.register(Struct)  # type: ignore[untyped-decorator]
def _type_of(value: Struct, context: Any) -> Any:
    return value.ref


@register_model(Ref)
class _RefModel(models.OpaqueModel):  # type: ignore[misc]
    """An untyped pointer."""


@unbox(Ref)  # type: ignore[untyped-decorator]
def _unbox(ref: Ref, value: Any, c: Any) -> Any:
    number = c.pyapi.object_getattr_string(value, "address")
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(address, is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


@infer_getattr
class _RefAttributes(AttributeTemplate):  # type: ignore[misc]
    key = Ref

    def generic_resolve(self, ref: Ref, name: str) -> Any:
        field = ref.fields.get(name)
        return None if field is None else field.type


def _word(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Return a pointer to the word of LLVM type `kind` at `address + offset`."""
    at = builder.gep(address, [ir.IntType(64)(offset)], inbounds=True)
    return builder.bitcast(at, kind.as_pointer())


def _load(builder: Any, address: Any, offset: int, kind: Any, mutable: bool) -> Any:
    loaded = builder.load(_word(builder, address, offset, kind))
    if not mutable:  # nothing that compiled code does changes it: read once, keep
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
    return loaded


@lower_getattr_generic(Ref)  # type: ignore[untyped-decorator]
def _load_field(context: Any, builder: Any, ref: Ref, address: Any, name: str) -> Any:
    field, word = ref.fields[name], ir.IntType(64)
    if field.dtype is None:
        kind = word if field.type is types.boolean else context.get_value_type(field.type)
        value = _load(builder, address, field.offset, kind, field.mutable)
        if field.type is types.boolean:
            return builder.icmp_signed("!=", value, word(0))
        return value
    made = context.make_array(field.type)(context, builder)
    pointer = context.get_data_type(field.type.dtype).as_pointer()
    data = _load(builder, address, field.offset, pointer, field.mutable)
    offsets = (field.offset + _WORD * (1 + axis) for axis in range(field.type.ndim))
    shape = [_load(builder, address, offset, word, field.mutable) for offset in offsets]
    strides = [word(field.dtype.itemsize)]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size, flags=["nsw"]))
    populate_array(made, data, shape, strides, field.dtype.itemsize, None)
    return made._getvalue()


@lower_setattr_generic(Ref)  # type: ignore[untyped-decorator]
def _store_field(context: Any, builder: Any, sig: Any, args: Any, name: str) -> None:
    (ref, _), (address, value) = sig.args, args
    field, word = ref.fields[name], ir.IntType(64)
    if not field.mutable:
        raise TypeError(f"{ref}.{name} cannot be set")
    if field.dtype is None:
        if field.type is types.boolean:
            value = builder.zext(value, word)
        builder.store(value, _word(builder, address, field.offset, value.type))
        return
    array = context.make_array(field.type)(context, builder, value)
    builder.store(array.data, _word(builder, address, field.offset, array.data.type))
    for axis, size in enumerate(cgutils.unpack_tuple(builder, array.shape, field.type.ndim)):
        builder.store(size, _word(builder, address, field.offset + _WORD * (1 + axis), word))
