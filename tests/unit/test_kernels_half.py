"""Sixteen-bit numbers on the wire, against torch's and numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evergrad.kernels.half import as_seen, as_sent, decoded, encoded

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def bits_of_torch(values: np.ndarray, kind: str) -> np.ndarray:
    return torch.from_numpy(values).to(KINDS[kind]).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_rounding_is_that_of_torch(kind: str, words: list[int]) -> None:
    values = np.array(words, np.uint32).view(np.float32)
    finite = values[~np.isnan(values)]
    np.testing.assert_array_equal(encoded(finite, kind), bits_of_torch(finite, kind))


def test_values_between_two_halves_round_to_the_nearest_and_ties_to_even() -> None:
    finite = ALL_HALVES[np.isfinite(ALL_HALVES.view(np.float16))]
    low = finite.view(np.float16).astype(np.float64)
    high = (finite + 1).astype(np.uint16).view(np.float16).astype(np.float64)
    for share in (0.25, 0.5, 0.75):
        between = (low + share * (high - low)).astype(np.float32)
        between = between[np.isfinite(between)]
        np.testing.assert_array_equal(encoded(between, "float16"), bits_of_torch(between, "float16"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_sixteen_bit_number_is_read_as_torch_reads_it(kind: str) -> None:
    expected = torch.from_numpy(ALL_HALVES.view(np.int16)).view(KINDS[kind]).float().numpy()
    np.testing.assert_array_equal(decoded(ALL_HALVES, kind), expected)


def test_nan_stays_nan_and_too_large_becomes_infinity() -> None:
    values = np.array([np.nan, 1e6, -1e6, np.inf, 3.4e38], np.float32)
    np.testing.assert_array_equal(
        decoded(encoded(values, "float16"), "float16"), [np.nan, np.inf, -np.inf, np.inf, np.inf]
    )
    # the bits of a NaN that rounding up would carry over into the sign
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    for kind in KINDS:
        assert np.isnan(decoded(encoded(nans, kind), kind)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_stays_also_of_nothing(kind: str) -> None:
    for shape in ((0,), (0, 4), (3, 4), (5, 17)):
        halves = encoded(np.zeros(shape, np.float32), kind)
        assert halves.shape == shape
        assert halves.dtype == np.uint16
        assert decoded(halves, kind).shape == shape


def test_seeing_and_sending_copy_nothing_and_undo_each_other() -> None:
    for kind, dtype in (("bfloat16", np.uint16), ("float16", np.int16)):
        seen = as_seen(ALL_HALVES, kind)
        assert seen.dtype == dtype
        assert np.shares_memory(seen, ALL_HALVES)
        assert as_sent(seen).dtype == np.uint16
    floats = np.zeros(3, np.float32)
    assert as_sent(floats) is encoded(floats, "float32") is decoded(floats, "float32") is floats
