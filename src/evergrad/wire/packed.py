"""Messages with an array for each table, as they cross the wire: one array of each kind, however many tables there are.

An array of its own costs some microseconds at each end: its description, its checks and its frame. A push of 26 tables
has 52.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, get_type_hints

import msgspec
import numpy as np

from evergrad.kernels.arrays import address_of
from evergrad.messages import AnyArray, AnyMessage, Keys, Message, Pull, Pulled, Push, PushBatch, TableGrads, TableKeys
from evergrad.messages.model import Count

Shapes = tuple[tuple[Count, ...], ...]


class PackedRows(msgspec.Struct, frozen=True):
    """Arrays of one type, one after the other."""

    shapes: Shapes
    flat: AnyArray

    @classmethod
    def of(cls, arrays: Sequence[AnyArray]) -> "PackedRows":
        """Pack."""
        return cls(tuple(a.shape for a in arrays), flattened(arrays, np.float32))

    def parts(self) -> tuple[AnyArray, ...]:
        """Unpack; raises ValueError if this is not what `of` makes."""
        return tuple(split(self.flat, self.shapes))


class PackedKeys(msgspec.Struct, frozen=True):
    """Keys of tables."""

    tables: tuple[int, ...]
    shapes: Shapes
    keys: Keys

    @classmethod
    def of(cls, tables: Sequence[TableKeys]) -> "PackedKeys":
        """Pack."""
        keys = [t.keys for t in tables]
        return cls(tuple(t.table for t in tables), tuple(k.shape for k in keys), flattened(keys, np.int64))

    def parts(self) -> tuple[TableKeys, ...]:
        """Unpack; raises ValueError if this is not what `of` makes."""
        keys = split(self.keys, self.shapes)
        return tuple(map(TableKeys, *same_length(self.tables, keys)))


class PackedGrads(msgspec.Struct, frozen=True):
    """Gradients of tables."""

    tables: tuple[int, ...]
    lrs: tuple[float, ...]
    key_shapes: Shapes
    keys: Keys
    grad_shapes: Shapes
    grads: AnyArray

    @classmethod
    def of(cls, tables: Sequence[TableGrads]) -> "PackedGrads":
        """Pack."""
        keys, grads = [t.keys for t in tables], [t.grads for t in tables]
        return cls(
            tuple(t.table for t in tables),
            tuple(t.lr for t in tables),
            tuple(k.shape for k in keys),
            flattened(keys, np.int64),
            tuple(g.shape for g in grads),
            flattened(grads, np.float32),
        )

    def parts(self) -> tuple[TableGrads, ...]:
        """Unpack; raises ValueError if this is not what `of` makes."""
        keys, grads = split(self.keys, self.key_shapes), split(self.grads, self.grad_shapes)
        return tuple(map(TableGrads, *same_length(self.tables, self.lrs, keys, grads)))


_FORMS: dict[type[Message], dict[str, Any]] = {
    Pull: {"tables": PackedKeys},
    Pulled: {"rows": PackedRows},
    Push: {"tables": PackedGrads, "evict": PackedKeys},
    PushBatch: {"tables": PackedGrads, "evict": PackedKeys},
}


def _packed_kind(kind: type[Message], forms: dict[str, Any]) -> Any:
    """The kind of message that has the forms in place of its own fields, under the same name."""
    types = get_type_hints(kind)
    fields = [(name, forms.get(name, types[name])) for name in kind.__struct_fields__]
    return msgspec.defstruct(kind.__name__, fields, bases=(Message,), frozen=True, tag=True)


_PACKED = {kind: _packed_kind(kind, forms) for kind, forms in _FORMS.items()}
_KINDS = {packed: kind for kind, packed in _PACKED.items()}


def on_the_wire(kind: type[Message]) -> Any:
    """The kind of message that crosses the wire in place of this one."""
    return _PACKED.get(kind, kind)


def pack(message: Message) -> Message:
    """The message as it crosses the wire. Arrays of tables that do not lie side by side are copied."""
    if (kind := _PACKED.get(type(message))) is None:
        return message
    forms = _FORMS[type(message)]
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    values.update((name, form.of(values[name])) for name, form in forms.items())
    packed: Message = kind(**values)
    return packed


def unpack(message: Any) -> AnyMessage:
    """What `pack` was given; raises ValueError if it was not what it makes."""
    if (kind := _KINDS.get(type(message))) is None:
        unpacked: AnyMessage = message
        return unpacked
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    values.update((name, values[name].parts()) for name in _FORMS[kind])
    return kind(**values)  # type: ignore[return-value]  # one of those in _FORMS


def flattened(arrays: Sequence[AnyArray], dtype: type[np.generic]) -> AnyArray:
    """All arrays one after the other, flat: a view, if they are one or lie side by side in one; else a copy.

    Args:
        arrays: of one type.
        dtype: the type where there are none.
    """
    if len({a.dtype for a in arrays}) > 1:
        raise TypeError("cannot send arrays of several types as one")
    full = [a for a in arrays if a.size]
    if not full:
        return np.empty(0, arrays[0].dtype if arrays else dtype)
    side_by_side = _stretch_of(full)
    return np.concatenate([a.reshape(-1) for a in full]) if side_by_side is None else side_by_side


def _stretch_of(arrays: Sequence[AnyArray]) -> AnyArray | None:
    """The stretch of one array that consists of these, in order; None if there is none."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    whole = arrays[0].base
    if not isinstance(whole, np.ndarray) or whole.dtype != arrays[0].dtype or not whole.flags.c_contiguous:
        return None
    start = end = address_of(arrays[0])
    for a in arrays:
        if a.base is not whole or not a.flags.c_contiguous or address_of(a) != end:
            return None
        end += a.nbytes
    begin = address_of(whole)
    return whole.reshape(-1)[(start - begin) // whole.itemsize : (end - begin) // whole.itemsize]


def split(flat: AnyArray, shapes: Shapes) -> list[AnyArray]:
    """Arrays of these shapes out of one; raises ValueError unless they are all of it."""
    parts, start = [], 0
    for shape in shapes:
        stop = start + prod(shape)
        parts.append(flat[start:stop].reshape(shape))
        start = stop
    if flat.ndim != 1 or start != flat.size:
        raise ValueError("arrays whose shapes do not fit their bytes")
    return parts


def same_length(*columns: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The same columns; raises ValueError if some are longer than others."""
    if len({len(column) for column in columns}) > 1:
        raise ValueError("columns of different lengths")
    return columns
