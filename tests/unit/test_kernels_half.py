"""Sixteen-bit numbers on the wire, against torch's and numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evergrad.kernels.half import from_bfloat16, from_float16, to_bfloat16, to_float16

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def bits_of_torch(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_rounding_is_that_of_torch(words: list[int]) -> None:
    values = np.array(words, np.uint32).view(np.float32)
    finite = values[~np.isnan(values)]
    np.testing.assert_array_equal(to_bfloat16(finite), bits_of_torch(finite, torch.bfloat16))
    np.testing.assert_array_equal(to_float16(finite), bits_of_torch(finite, torch.float16))


def test_values_between_two_halves_round_to_the_nearest_and_ties_to_even() -> None:
    finite = ALL_HALVES[np.isfinite(ALL_HALVES.view(np.float16))]
    low = finite.view(np.float16).astype(np.float64)
    high = (finite + 1).astype(np.uint16).view(np.float16).astype(np.float64)
    for share in (0.25, 0.5, 0.75):
        between = (low + share * (high - low)).astype(np.float32)
        between = between[np.isfinite(between)]
        np.testing.assert_array_equal(to_float16(between), bits_of_torch(between, torch.float16))


@pytest.mark.parametrize(("read", "dtype"), [(from_bfloat16, torch.bfloat16), (from_float16, torch.float16)])
def test_every_sixteen_bit_number_is_read_as_torch_reads_it(read: object, dtype: torch.dtype) -> None:
    expected = torch.from_numpy(ALL_HALVES.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(read(ALL_HALVES), expected)  # type: ignore[operator]


def test_nan_stays_nan_and_too_large_becomes_infinity() -> None:
    values = np.array([np.nan, 1e6, -1e6, np.inf, 3.4e38], np.float32)
    np.testing.assert_array_equal(from_float16(to_float16(values)), [np.nan, np.inf, -np.inf, np.inf, np.inf])
    assert np.isnan(from_bfloat16(to_bfloat16(values))[0])


def test_the_shape_stays_also_of_nothing() -> None:
    for shape in ((0,), (0, 4), (3, 4)):
        assert from_bfloat16(to_bfloat16(np.zeros(shape, np.float32))).shape == shape
