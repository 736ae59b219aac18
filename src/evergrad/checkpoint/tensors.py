"""safetensors files as buffers, without a copy: a header, then the arrays one after the other.

The library's numpy functions copy what they write twice and what they read once, which is slower than the disk; other
programs read these files with it, and files it has written are read here.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from evergrad.errors import CheckpointError
from evergrad.messages import AnyArray


class Type(NamedTuple):
    """A type of numbers: the format's name, and bytes of one."""

    name: str
    bytes: int


TYPES = {
    "float32": Type("F32", 4), "float16": Type("F16", 2), "bfloat16": Type("BF16", 2),
    "int64": Type("I64", 8), "int32": Type("I32", 4), "int16": Type("I16", 2), "int8": Type("I8", 1),
    "uint8": Type("U8", 1), "bool": Type("BOOL", 1),
}  # fmt: skip
"""By torch's and numpy's names."""
_READ: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
"""The types that files of a checkpoint hold."""
MOST_HEADER_BYTES = 100_000_000
"""More is refused, as the library does."""
Tensors = dict[str, AnyArray]
Wanted = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]


class _Described(msgspec.Struct):
    """A tensor as the header has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header(tensors: Mapping[str, tuple[Type, Sequence[int]]]) -> bytes:
    """The head of a file whose tensors, of these types and shapes, follow in this order."""
    described, start = {}, 0
    for name, (kind, shape) in tensors.items():
        size = kind.bytes * prod(shape)
        described[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode(tensors: Mapping[str, AnyArray]) -> list[memoryview]:
    """A file as parts to be written one after the other.

    They share memory with what is contiguous. Arrays of the widest types come first, so that all are aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    head = header({name: (TYPES[array.dtype.name], array.shape) for name, array in ordered})
    return [memoryview(head), *(bytes_of(array) for _, array in ordered)]


def bytes_of(array: AnyArray) -> memoryview:
    """The bytes of an array in the order of its elements."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def decode(data: memoryview) -> dict[str, AnyArray]:
    """The tensors of a file, as views of `data` that cannot be written to.

    Raises:
        CheckpointError: it is no such file; the sentence goes on from its name.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > min(len(data), MOST_HEADER_BYTES):
        raise CheckpointError("is no safetensors file: it is too short for its header")
    try:
        described: dict[str, Any] = msgspec.json.decode(data[8:end], type=dict[str, msgspec.Raw])
        described.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Described) for name, raw in described.items()}
    except msgspec.MsgspecError as exc:
        raise CheckpointError(f"is no safetensors file: {exc}") from exc
    body = data[end:]
    found = {name: _array(name, tensor, body) for name, tensor in tensors.items()}
    if sum(array.nbytes for array in found.values()) != len(body):
        raise CheckpointError("has other bytes than those of its tensors")
    return found


def check(tensors: Mapping[str, AnyArray], shapes: Wanted) -> None:
    """See that there are exactly these tensors.

    Raises:
        CheckpointError: there are not; the sentence goes on from the file's name.
    """
    if tensors.keys() != shapes.keys():
        raise CheckpointError(f"holds {', '.join(sorted(tensors)) or 'nothing'}, not {', '.join(sorted(shapes))}")
    for name, (dtype, shape) in shapes.items():
        found = tensors[name]
        if found.dtype != dtype or found.shape != shape:
            what = f"{found.dtype} {list(found.shape)}, not {np.dtype(dtype)} {list(shape)}"
            raise CheckpointError(f"has {name!r} as {what}")


def _array(name: str, tensor: _Described, body: memoryview) -> AnyArray:
    dtype = _READ.get(tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"has {name!r} of the type {tensor.dtype}, which is none of {', '.join(_READ)}")
    start, stop = tensor.data_offsets
    size = dtype.itemsize * prod(tensor.shape)
    if min(tensor.shape, default=0) < 0 or not 0 <= start <= stop <= len(body) or stop - start != size:
        raise CheckpointError(
            f"has {name!r} of shape {list(tensor.shape)} in bytes {start} to {stop}, which do not fit"
        )
    array: AnyArray = np.frombuffer(body[start:stop].toreadonly(), dtype)
    return array.reshape(tensor.shape)
