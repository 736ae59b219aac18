"""Slots of keys, and the different ones among keys that repeat."""

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Keys
from evergrad.kernels.jit import Integer, i32, i64, inline, making_kernel, reads, writes
from evergrad.placement import SLOTS

SLOT_SHIFT = np.uint64(64 - (SLOTS - 1).bit_length())
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@inline
def mix(x: np.uint64) -> np.uint64:
    """A bijection of 64-bit numbers in which every bit of the result depends on every bit of `x`.

    *Source*: the finalizer of splitmix64 (Steele, Lea and Flood 2014; constants of Stafford's variant 13).
    """
    x = (x ^ (x >> _S1)) * _M1
    x = (x ^ (x >> _S2)) * _M2
    return x ^ (x >> _S3)


@inline
def hash_key(key: np.int64) -> np.uint64:
    """The hash of a key: its top bits are the slot, its low bits the place to look inside the slot."""
    return mix(np.uint64(key) + np.uint64(0x9E3779B97F4A7C15))


@making_kernel(writes(i32), reads(i64))
def slots_of(keys: Keys) -> NDArray[np.int32]:
    """The slot of each key, by the top 14 bits of its hash."""
    slots = np.empty(keys.size, np.int32)
    for i in range(keys.size):
        slots[i] = np.int32(hash_key(keys[i]) >> SLOT_SHIFT)
    return slots


@inline
def number_of(
    key: np.int64, keys: Keys, first: Integer, count: Integer, scratch: NDArray[np.int32], mask: Integer
) -> Integer:
    """The number of a key among `count` different ones, which stand in `keys` from `first` on; put there if new.

    `scratch` holds -1, or the number of a key at a place its hash leads to.
    """
    at = np.int64(hash_key(key)) & mask
    while scratch[at] >= 0 and keys[first + scratch[at]] != key:
        at = (at + 1) & mask
    if scratch[at] < 0:
        scratch[at] = count
        keys[first + count] = key
    number: Integer = scratch[at]
    return number


@making_kernel(i64, reads(i64), writes(i64), writes(i32))
def _unique(keys: Keys, uniques: Keys, numbers: NDArray[np.int32]) -> int:
    """Write the different keys in order of first appearance, and for each key its number among them."""
    size = 16
    while size < 2 * keys.size:
        size *= 2
    mask = np.int64(size - 1)
    table = np.full(size, -1, np.int32)
    count = 0
    for i in range(keys.size):
        found = number_of(keys[i], uniques, 0, count, table, mask)
        count += found == count
        numbers[i] = found
    return count


def unique(keys: Keys) -> tuple[Keys, NDArray[np.int32]]:
    """The different keys in order of first appearance, and `numbers` with `uniques[numbers] == keys`.

    Cost: one probe of a scratch table a key.
    """
    uniques = np.empty(keys.size, np.int64)
    numbers = np.empty(keys.size, np.int32)
    count = _unique(keys, uniques, numbers)
    return uniques[:count], numbers
