"""All features of a batch numbered and read at once, against the same one by one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.kernels.arrays import address_of
from evergrad.kernels.features import Features, Ids, are_numbered, gather, number
from evergrad.kernels.hashing import unique

ANY_KEY = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 2))


def features(ids, tables, dims):
    return Features(np.array([i.size for i in ids]), np.array(tables), np.array(dims))


def numbered(ids, tables, paddings=None):
    """What `number` finds: the keys of each table, and each feature's index."""
    paddings = [None] * len(ids) if paddings is None else paddings
    described = Ids(
        np.array([address_of(i) for i in ids]),
        np.array([p or 0 for p in paddings]),
        np.array([p is not None for p in paddings]),
    )
    keys, bounds, index = number(features(ids, tables, [1] * len(ids)), described)
    assert bounds[-1] == keys.size
    ends = np.cumsum([i.size for i in ids])
    of_tables = [keys[a:b] for a, b in pairwise(bounds)]
    return of_tables, np.split(index, ends[:-1])


def addresses(arrays):
    return np.array([address_of(a) for a in arrays])


@settings(deadline=None)
@given(st.lists(st.lists(st.lists(ANY_KEY, max_size=9), min_size=1, max_size=3), min_size=1, max_size=4))
def test_each_tables_different_keys_come_once_in_order_of_first_appearance(tables):
    ids = [np.array(i, np.int64) for of_table in tables for i in of_table]
    of_feature = [t for t, of_table in enumerate(tables) for _ in of_table]
    keys, index = numbered(ids, of_feature)
    for t, of_table in enumerate(tables):
        met = [key for i in of_table for key in i]
        assert keys[t].tolist() == list(dict.fromkeys(met))
    for i, table, numbers in zip(ids, of_feature, index, strict=True):
        assert (keys[table][numbers] == i).all()


def test_one_feature_is_numbered_as_by_unique():
    ids = np.random.default_rng(3).integers(-300, 300, 2000)
    (keys,), (index,) = numbered([ids], [0])
    wanted, numbers = unique(ids)
    assert (keys == wanted).all()
    assert (index == numbers).all()


@pytest.mark.parametrize("padding", [0, -1, 7, 2**63 - 1, -(2**63)])
def test_padding_has_no_number_and_only_where_it_is_padding(padding):
    ids = np.array([padding, 5, padding, 6])
    (keys,), index = numbered([ids, ids], [0, 0], [padding, None])
    assert index[0].tolist() == [-1, 0, -1, 1]
    assert keys.tolist() == [5, 6, padding]
    assert index[1].tolist() == [2, 0, 2, 1]


def test_a_table_of_nothing_but_padding_has_no_keys():
    keys, index = numbered([np.zeros(3, np.int64), np.array([4])], [0, 1], [0, 0])
    assert [k.tolist() for k in keys] == [[], [4]]
    assert [i.tolist() for i in index] == [[-1, -1, -1], [0]]


def test_ids_that_changed_are_noticed():
    ids = np.array([3, 0, 3, 9])
    (keys,), (index,) = numbered([ids], [0], [0])
    assert are_numbered(address_of(ids), keys, index, 0)
    for at in range(4):
        changed = ids.copy()
        changed[at] = 8
        assert not are_numbered(address_of(changed), keys, index, 0)
    assert not are_numbered(address_of(np.array([3, 1, 3, 9])), keys, index, 0)


@pytest.mark.parametrize("dim", [1, 3, 8, 16, 50])
def test_each_id_reads_its_row_and_padding_zeros(dim):
    rng = np.random.default_rng(dim)
    tables = [rng.random((n, d), np.float32) for n, d in ((5, dim), (40, 2 * dim))]
    index = [rng.integers(-1, n, count).astype(np.int32) for n, count in ((5, 30), (40, 7), (40, 0))]
    out = [
        np.full((i.size, t.shape[1]), 9, np.float32)
        for i, t in zip(index, [tables[0], tables[1], tables[1]], strict=True)
    ]
    described = features(index, [0, 1, 1], [dim, 2 * dim, 2 * dim])
    gather(described, addresses(index), addresses(tables), addresses(out))
    for i, table, read in zip(index, [0, 1, 1], out, strict=True):
        assert (read == np.where(i[:, None] < 0, 0, tables[table][i])).all()
