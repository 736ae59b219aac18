import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evergrad.kernels.hashing import slots_of, unique
from evergrad.placement import SLOTS

EDGES = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, 0, 1, 2**53 + 1], np.int64)


def test_slots_of_some_keys_are_pinned_because_files_depend_on_them():
    keys = np.array([0, 1, -1, 2**63 - 1, -(2**63)], np.int64)
    assert slots_of(keys).tolist() == [14472, 9282, 14646, 2713, 4615]


@pytest.mark.parametrize("stride", [1, 2, 1024, SLOTS, 1 << 40])
def test_regular_keys_spread_evenly_over_slots(stride):
    slots = slots_of(np.arange(64 * SLOTS, dtype=np.int64) * stride)
    counts = np.bincount(slots, minlength=SLOTS)
    assert counts.size == SLOTS
    chi_square = ((counts - 64) ** 2 / 64).sum()
    assert abs(chi_square - SLOTS) < 6 * np.sqrt(2 * SLOTS)


@settings(deadline=None)
@given(
    arrays(np.int64, st.integers(0, 60), elements=st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3))),
)
def test_different_keys_come_once_in_order_of_first_appearance(keys):
    uniques, numbers = unique(keys)
    assert (uniques[numbers] == keys).all()
    assert uniques.tolist() == list(dict.fromkeys(keys.tolist()))


def test_no_key_is_reserved_when_grouping():
    uniques, numbers = unique(np.concatenate([EDGES, EDGES[::-1]]))
    assert uniques.tolist() == EDGES.tolist()
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]


def test_read_only_and_unaligned_keys_as_they_lie_in_a_network_buffer_are_taken():
    raw = b"\0" + EDGES.tobytes()
    assert (slots_of(np.frombuffer(raw, np.int64, EDGES.size, 1)) == slots_of(EDGES)).all()


def test_nothing_to_group():
    uniques, numbers = unique(np.empty(0, np.int64))
    assert (uniques.size, numbers.size) == (0, 0)
