"""float16 and bfloat16 on the wire: 16 bits a number, made and read without a detour over other types.

Rounding is to the nearest, ties to even, as torch and numpy round. NaN stays NaN; what is too large becomes infinity.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats
from evergrad.kernels.jit import inline, kernel, reads, u16, u32, void, writes

Halves = NDArray[np.uint16]
Words = NDArray[np.uint32]
Integer = int | np.int64


@inline
def bfloat16_of(word: Integer) -> Integer:
    """The bits of a float32 as those of a bfloat16."""
    if word & 0x7FFFFFFF > 0x7F800000:
        return (word >> 16) | 0x40
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


@inline
def float16_of(word: Integer) -> Integer:
    """The bits of a float32 as those of a float16."""
    sign, size = (word >> 16) & 0x8000, word & 0x7FFFFFFF
    if size > 0x7F800000:
        return sign | 0x7E00
    if size >= 0x477FF000:
        return sign | 0x7C00
    if size >= 0x38800000:
        return sign | ((size + 0xFFF + ((size >> 13) & 1) - 0x38000000) >> 13)
    if size <= 0x33000000:
        return sign
    shift = 126 - (size >> 23)
    fraction = (size & 0x7FFFFF) | 0x800000
    half = fraction >> shift
    rest, middle = fraction & ((1 << shift) - 1), 1 << (shift - 1)
    return sign | (half + (1 if rest > middle or (rest == middle and half & 1) else 0))


@kernel(void, reads(u32), writes(u16))
def _to_bfloat16(words: Words, halves: Halves) -> None:
    for i in range(words.size):
        halves[i] = bfloat16_of(np.int64(words[i]))


@kernel(void, reads(u32), writes(u16))
def _to_float16(words: Words, halves: Halves) -> None:
    for i in range(words.size):
        halves[i] = float16_of(np.int64(words[i]))


@kernel(void, reads(u16), writes(u32))
def _from_bfloat16(halves: Halves, words: Words) -> None:
    for i in range(halves.size):
        words[i] = np.uint32(halves[i]) << np.uint32(16)


@kernel(void, reads(u16), writes(u32))
def _from_float16(halves: Halves, words: Words) -> None:
    for i in range(halves.size):
        half = np.int64(halves[i])
        sign, size = (half & 0x8000) << 16, half & 0x7FFF
        if size >= 0x7C00:
            words[i] = sign | (size << 13) | 0x7F800000
        elif size >= 0x400:
            words[i] = sign | ((size << 13) + 0x38000000)
        elif size:
            shift = 0
            while not size & 0x400:
                size <<= 1
                shift += 1
            words[i] = sign | ((113 - shift) << 23) | ((size & 0x3FF) << 13)
        else:
            words[i] = sign


def encoded(values: Floats, kind: str) -> NDArray[Any]:
    """float32 of any shape as "float32", "bfloat16" or "float16"; the latter two as uint16."""
    match kind:
        case "bfloat16":
            return to_bfloat16(values)
        case "float16":
            return to_float16(values)
        case _:
            return values


def decoded(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """What `encoded` made, as float32."""
    match kind:
        case "bfloat16":
            return from_bfloat16(values)
        case "float16":
            return from_float16(values)
        case _:
            return values


def to_bfloat16(values: Floats) -> Halves:
    """float32 of any shape as bfloat16 bits of that shape."""
    return _halves(values, _to_bfloat16)


def to_float16(values: Floats) -> Halves:
    """float32 of any shape as float16 bits of that shape."""
    return _halves(values, _to_float16)


def from_bfloat16(halves: Halves) -> Floats:
    """Bfloat16 bits of any shape as float32 of that shape; exact."""
    return _floats(halves, _from_bfloat16)


def from_float16(halves: Halves) -> Floats:
    """float16 bits of any shape as float32 of that shape; exact."""
    return _floats(halves, _from_float16)


def _halves(values: Floats, convert: Callable[[Words, Halves], None]) -> Halves:
    halves = np.empty(values.shape, np.uint16)
    convert(np.ascontiguousarray(values).reshape(-1).view(np.uint32), halves.reshape(-1))
    return halves


def _floats(halves: Halves, convert: Callable[[Halves, Words], None]) -> Floats:
    floats = np.empty(halves.shape, np.float32)
    convert(np.ascontiguousarray(halves).reshape(-1), floats.reshape(-1).view(np.uint32))
    return floats
