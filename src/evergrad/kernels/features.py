"""All features of a batch in one call each: their ids numbered, their rows gathered.

What a script computes with lies in arrays of torch's, one or more a feature, so these kernels take addresses. Whoever
calls keeps the arrays alive and vouches for their sizes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Integers, Keys
from evergrad.kernels.hashing import number_of
from evergrad.kernels.jit import flag, floats_at, i32, i64, int32s_at, int64s_at, kernel, reads, record, void, writes

ANY = 1 << 40
"""The size of an array whose end nobody looks at."""

Index = NDArray[np.int32]
"""For each position the number of its row; negative: padding, which is no row."""


class Features(NamedTuple):
    """Features one after the other, those of one table side by side. All of shape (f,)."""

    counts: Integers
    """How many ids each has."""
    tables: Integers
    """Which table each reads, counted from 0 in this order."""
    dims: Integers
    """The length of a row."""


class Ids(NamedTuple):
    """The ids of features. All of shape (f,)."""

    addresses: Integers
    """Where each feature's ids lie, int64."""
    paddings: Keys
    """An id that has no row ..."""
    is_padded: NDArray[np.bool_]
    """... where this is set."""


FEATURES = record(Features, writes(i64), writes(i64), writes(i64))
_IDS = record(Ids, writes(i64), writes(i64), writes(flag))


@kernel(void, FEATURES, _IDS, writes(i64), writes(i64), writes(i32), writes(i32))
def _number(features: Features, ids: Ids, keys: Keys, bounds: Integers, index: Index, scratch: Index) -> None:
    table = np.int64(-1)
    start = first = count = mask = np.int64(0)
    for f in range(features.tables.size):
        if features.tables[f] != table:
            table, first, count = features.tables[f], first + count, np.int64(0)
            bounds[table] = first
            positions, later = np.int64(0), f
            while later < features.tables.size and features.tables[later] == table:
                positions += features.counts[later]
                later += 1
            size = np.int64(16)
            while size < 2 * positions:
                size *= 2
            mask = size - 1
            for i in range(size):
                scratch[i] = -1
        of_feature = int64s_at(ids.addresses[f], features.counts[f])
        padding, is_padded = ids.paddings[f], ids.is_padded[f]
        for i in range(of_feature.size):
            key = of_feature[i]
            if is_padded and key == padding:
                index[start + i] = -1
            else:
                found = number_of(key, keys, first, count, scratch, mask)
                count += found == count
                index[start + i] = found
        start += features.counts[f]
    bounds[bounds.size - 1] = first + count


def number(features: Features, ids: Ids) -> tuple[Keys, Integers, Index]:
    """Find the different keys of each table, in order of first appearance.

    Returns:
        The keys of all tables one after the other; where those of each table begin, and the end of the last; and for
        each id, feature after feature, its key's number among those of its table, -1 for padding.
    """
    positions = int(features.counts.sum())
    keys, index = np.empty(positions, np.int64), np.empty(positions, np.int32)
    bounds = np.empty(int(features.tables[-1]) + 2, np.int64)
    _number(features, ids, keys, bounds, index, np.empty(4 * positions + 16, np.int32))
    return keys[: bounds[-1]], bounds, index


@kernel(flag, i64, reads(i64), reads(i32), i64)
def are_numbered(address: int, keys: Keys, index: Index, padding: int) -> bool:
    """Whether the ids that lie here, int64, are still those that `number` gave these numbers."""
    ids = int64s_at(address, index.size)
    changed = 0
    for i in range(index.size):
        changed += ids[i] != (keys[index[i]] if index[i] >= 0 else padding)
    return changed == 0


@kernel(void, FEATURES, reads(i64), reads(i64), reads(i64))
def gather(features: Features, index: Integers, rows: Integers, out: Integers) -> None:
    """Copy to each id the row it reads; zeros where its number is negative.

    Args:
        features: what is read.
        index: for each feature the address of the numbers of its rows, int32.
        rows: for each table the address of its rows, float32.
        out: for each feature the address of its result, float32, one row an id.
    """
    for f in range(features.tables.size):
        count, dim = features.counts[f], features.dims[f]
        numbers, source = int32s_at(index[f], count), floats_at(rows[features.tables[f]], ANY)
        to = floats_at(out[f], count * dim)
        for i in range(count):
            row, into = np.int64(numbers[i]), to[i * dim : i * dim + dim]
            if row >= 0:
                value = source[row * dim : row * dim + dim]
                for c in range(dim):
                    into[c] = value[c]
            else:
                for c in range(dim):
                    into[c] = 0.0
