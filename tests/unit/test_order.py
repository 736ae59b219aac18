"""The order of an epoch's samples."""

import subprocess
import sys

import numpy as np
import pytest

from evergrad.data.order import epoch_order
from evergrad.errors import InvariantError


def order(samples, seed=0, epoch=0, shuffle=True):
    return epoch_order(samples, seed, epoch, np.arange(samples, dtype=np.int64), shuffle)


@pytest.mark.parametrize("samples", [*range(1, 201), 255, 256, 257, 4095, 4097, 100_003, 2**17, 2**17 + 1])
def test_every_sample_comes_exactly_once(samples):
    for epoch in range(3):
        assert np.array_equal(np.sort(order(samples, seed=5, epoch=epoch)), np.arange(samples))


def test_huge_datasets_need_no_memory_and_keep_samples_apart():
    for samples in (2**40 + 3, 2**62 + 1, 2**63 - 1):
        positions = np.concatenate([np.arange(5000), samples - 1 - np.arange(5000)])
        ids = epoch_order(samples, 1, 2, positions)
        assert len(np.unique(ids)) == 10_000
        assert ids.min() >= 0
        assert ids.max() < samples
        assert abs(ids.mean() / samples - 0.5) < 0.02


def test_a_sample_does_not_depend_on_what_else_is_asked_for():
    whole = order(1000, seed=3, epoch=4)
    positions = np.array([999, 0, 17, 17], np.int64)
    assert np.array_equal(epoch_order(1000, 3, 4, positions), whole[positions])
    assert epoch_order(1000, 3, 4, positions[:0]).shape == (0,)


def test_the_order_is_the_same_on_every_machine():
    assert order(10, seed=1, epoch=2).tolist() == [4, 1, 6, 7, 3, 9, 8, 5, 2, 0]
    assert epoch_order(10**12, -7, 3, np.arange(3)).tolist() == [661380938702, 638779748237, 710807454077]


def test_epochs_and_seeds_have_unrelated_orders():
    orders = [order(1000, seed=s, epoch=e) for s in (0, 1, 2**40, -1) for e in range(5)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 12  # one sample in its place is the mean of chance
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15


def test_without_shuffling_the_order_is_the_datasets():
    assert np.array_equal(order(100, epoch=7, shuffle=False), np.arange(100))


@pytest.mark.parametrize("samples", [2, 3, 5, 10, 12])
def test_every_sample_is_equally_likely_at_every_position(samples):
    seeds = 3000
    counts = np.zeros((samples, samples))
    for seed in range(seeds):
        counts[np.arange(samples), order(samples, seed=seed)] += 1
    expected = seeds / samples
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (samples - 1) ** 2
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_neighbours_are_scattered():
    ids = order(100_000, seed=9)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(ids, np.arange(100_000))[0, 1]) < 0.02
    first_tenth = np.bincount(ids[:10_000] // 1000, minlength=100)
    chi2 = ((first_tenth - 100) ** 2 / (100 * 0.9)).sum()
    assert 40 < chi2 < 170  # 99 degrees of freedom
    assert 48_500 < (ids[1:] > ids[:-1]).sum() < 51_500


def test_a_position_outside_the_epoch_is_a_bug():
    for position in (-1, 10):
        with pytest.raises(InvariantError, match="outside the 10 samples"):
            epoch_order(10, 0, 0, np.array([position]))


@pytest.mark.parametrize("module", ["evergrad.data", "evergrad.data.order", "evergrad.metrics", "evergrad.schedule"])
def test_torch_and_numba_are_not_imported_before_they_are_needed(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
