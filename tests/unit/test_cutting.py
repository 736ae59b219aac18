"""Requests and pushes cut into messages of a limit."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad.messages import Attempt, Generation, GroupGrads, Pulled, Push, Request, TableGrads, Wire
from evergrad.pserver.parts import Parts
from evergrad.trainer.collected import Collected
from evergrad.trainer.cutting import cut_pull, cut_push, packed

ITEMS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=6)


@given(ITEMS, st.integers(1, 100))
def test_every_unit_is_in_one_bin_in_order_and_no_bin_of_several_units_is_above_the_limit(
    items: list[tuple[int, int]], limit: int
) -> None:
    bins = packed(items, limit)
    for number, (count, _) in enumerate(items):
        pieces = [p for b in bins for p in b if p.item == number]
        assert [i for p in pieces for i in range(p.start, p.stop)] == list(range(count))
        assert pieces, "an empty item is named too"
    for pieces in bins:
        units = sum(p.stop - p.start for p in pieces)
        assert units <= 1 or sum((p.stop - p.start) * items[p.item][1] for p in pieces) <= limit


def test_what_fits_is_one_message_with_nothing_copied() -> None:
    keys = np.arange(5)
    ((tables, groups),), _ = cut_pull([(3, keys, 64)], [(1, 10, 4)], 1000)
    assert tables[0].table == 3
    assert np.shares_memory(tables[0].keys, keys)
    assert (groups[0].group, groups[0].start, groups[0].stop) == (1, 0, 10)


@pytest.mark.parametrize(
    ("rows", "pieces", "at_once"),
    [(10, 1, 16), (25, 3, 16), (160, 16, 16), (400, 16, 16), (1000, 16, 16), (1009, 17, 16), (5000, 80, 16)],
)
def test_as_many_pieces_are_under_way_as_fit_into_a_message_none_of_them_small(
    rows: int, pieces: int, at_once: int
) -> None:
    found, many = cut_pull([(0, np.arange(rows), 1)], [], message_bytes=1000, piece_bytes=10)
    assert (len(found), many) == (pieces, at_once)
    assert max(wanted.tables[0].keys.size for wanted in found) * many < 1000 + many


@given(st.integers(1, 300), st.permutations(range(8)))
def test_a_push_in_parts_is_the_same_push_whatever_the_order_of_its_parts(limit: int, order: list[int]) -> None:
    rng = np.random.default_rng(limit)
    tables = [TableGrads(t, 0.1, np.arange(n), rng.random((n, 3), np.float32)) for t, n in ((0, 7), (1, 0), (2, 4))]
    groups = [GroupGrads(0, 0.1, rng.random(9, np.float32), np.ones(2, np.uint8))]
    cut = cut_push(tables, groups, limit)
    attempt = Attempt(1, 1)
    messages = [Push(Request(i), Generation(1), 0, 0, attempt, 1, *part, (), i, len(cut)) for i, part in enumerate(cut)]
    shuffled = sorted(messages, key=lambda m: order[m.part % 8])
    parts = Parts()
    (whole,) = [w for m in shuffled if (w := parts.add("push", m)) is not None]
    assert [t.table for t in whole.tables] == [0, 1, 2]
    for before, after in zip(tables, whole.tables, strict=True):
        np.testing.assert_array_equal(before.keys, after.keys)
        np.testing.assert_array_equal(before.grads, after.grads)
    np.testing.assert_array_equal(whole.groups[0].values, groups[0].values)


@given(st.integers(1, 300), st.randoms(use_true_random=False))
def test_a_pull_in_pieces_is_the_same_whatever_the_order_of_its_answers(limit: int, random: Random) -> None:
    rng = np.random.default_rng(limit)
    rows = {t: rng.random((n, 3), np.float32) for t, n in ((0, 7), (1, 0), (2, 4))}
    groups = {0: rng.random(9, np.float32), 1: np.arange(5)}
    keys = [(t, np.arange(r.shape[0]), 12) for t, r in rows.items()]
    requests, _ = cut_pull(keys, [(g, values.size, values.itemsize) for g, values in groups.items()], limit)
    collected, numbers = Collected(Wire.FLOAT32, requests), list(range(len(requests)))
    random.shuffle(numbers)
    for number in numbers:
        of_tables = tuple(rows[t.table][t.keys] for t in requests[number].tables)
        of_groups = tuple(groups[s.group][s.start : s.stop] for s in requests[number].spans)
        collected.take(number, Pulled(Request(number), 0, of_tables, of_groups))
    for table, expected in rows.items():
        np.testing.assert_array_equal(collected.rows(table), expected)
    for group, values in groups.items():
        np.testing.assert_array_equal(collected.group(group), values)
        assert collected.group(group).dtype == values.dtype
