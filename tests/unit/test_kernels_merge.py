import numpy as np
import pytest

from evergrad.kernels.merge import all_finite, has_duplicates


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5000, 9999])
def test_one_number_that_is_not_finite_is_found(bad, at):
    numbers = np.full(10_000, np.finfo(np.float32).max, np.float32)
    assert all_finite(numbers)
    numbers[at] = bad
    assert not all_finite(numbers)


def test_duplicates_are_found_wherever_they_stand():
    rows = np.random.default_rng(0).permutation(1 << 20)[:50_000]
    assert not has_duplicates(rows)
    rows[49_999] = rows[17]
    assert has_duplicates(rows)
    assert not has_duplicates(rows[:0])
