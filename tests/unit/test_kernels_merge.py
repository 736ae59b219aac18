import numpy as np
import pytest

from evergrad.kernels.half import as_seen, encoded
from evergrad.kernels.merge import add_rows, all_finite, divide_rows, has_duplicates


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5000, 9999])
def test_one_number_that_is_not_finite_is_found(bad, at):
    numbers = np.full(10_000, np.finfo(np.float32).max, np.float32)
    assert all_finite(numbers)
    numbers[at] = bad
    assert not all_finite(numbers)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_one_that_is_not_finite_is_found_at_every_place_of_every_length_in_every_type(kind):
    for size in (0, 1, 15, 16, 17, 40):
        numbers = encoded(np.full(size, -6e4, np.float32), kind)
        assert all_finite(as_seen(numbers, kind))
        for at in range(size):
            wrong = numbers.copy()
            wrong[at] = encoded(np.full(1, np.inf, np.float32), kind)[0]
            assert not all_finite(as_seen(wrong, kind))


def test_duplicates_are_found_wherever_they_stand():
    rows = np.random.default_rng(0).permutation(1 << 20)[:50_000]
    assert not has_duplicates(rows)
    rows[49_999] = rows[17]
    assert has_duplicates(rows)
    assert not has_duplicates(rows[:0])


def test_the_mean_of_a_key_that_stands_once_is_that_of_a_sum_from_zero_to_the_bit():
    grads = np.random.default_rng(0).standard_normal((300, 5)).astype(np.float32)
    grads[0] = -0.0
    grads[1] = np.float32(1e-45)
    numbers = np.arange(300, dtype=np.int32)
    means = []
    for shared in (np.full(300, -1, np.int32), numbers):
        sums, mean = np.zeros((300, 5)), np.empty((300, 5), np.float32)
        add_rows(sums, numbers, shared, grads, 3.0, 7.0, mean)
        divide_rows(sums, shared, 7.0, mean)
        means.append(mean)
    assert means[0].tobytes() == means[1].tobytes()
    assert means[0].tobytes() == ((0.0 + 3.0 * grads.astype(np.float64)) / 7.0).astype(np.float32).tobytes()
    assert not np.signbit(means[0][0]).any()
