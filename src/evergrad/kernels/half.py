"""float16 and bfloat16 on the wire: 16 bits a number, in messages as uint16.

Kernels read and write them where they compute (`kernels/lanes.py`, which says how they round); this is for whole
arrays. NaN stays NaN; what is too large becomes infinity.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats
from evergrad.kernels.jit import f32, i16, inline, kernel, reads, u16, void, writes
from evergrad.kernels.lanes import Count, Wired, load, over, store

DTYPES: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}
"""What kernels tell the types of a wire by."""


@inline
def _convert_line(at: int, count: Count, source: Wired, target: Wired) -> None:
    store(target, at, count, load(source, at, count))


@kernel(
    void,
    (reads(f32), reads(f32), reads(u16), reads(i16)),
    (writes(u16), writes(i16), writes(f32), writes(f32)),
)
def _convert(source: Wired, target: Wired) -> None:
    over(_convert_line, source.size, (source, target))


def as_seen(values: NDArray[Any], kind: str) -> Wired:
    """Numbers of a message as kernels see them, for a wire of "float32", "bfloat16" or "float16"; no copy."""
    return values.view(DTYPES[kind])


def as_sent(values: Wired) -> NDArray[Any]:
    """The same the other way; no copy."""
    return values if values.dtype == np.float32 else values.view(np.uint16)


def encoded(values: Floats, kind: str) -> NDArray[Any]:
    """float32 of any shape as it goes on the wire."""
    return values if kind == "float32" else as_sent(_converted(values, DTYPES[kind]))


def decoded(values: NDArray[Any], kind: str) -> Floats:
    """What `encoded` made, as float32; exact."""
    return values if kind == "float32" else _converted(as_seen(values, kind), np.float32)


def _converted(values: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    target = np.empty(values.shape, dtype)
    _convert(np.ascontiguousarray(values).reshape(-1), target.reshape(-1))
    return target
