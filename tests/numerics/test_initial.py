"""First values of rows: what they depend on, and how well they follow their distributions."""

from math import erfc, sqrt
from statistics import NormalDist

import numpy as np
import pytest
import torch

from evergrad import init_rows
from evergrad.errors import ConfigError
from evergrad.kernels.initial import (
    MIDDLE,
    initial_rows,
    log_of,
    middle_quantile,
    probability_below,
    table_seed,
    tail_quantile,
)

SEED = table_seed(0, "user")
NORMAL = NormalDist()
PINNED = [[1060171300, 3201439146], [3150027412, 1061443055], [1063167378, 1062693942]]


def ks_distance(sample, cdf):
    """Kolmogorov-Smirnov's distance times sqrt(n): above 1.95 once in a thousand samples."""
    at = np.vectorize(cdf)(np.sort(sample, axis=None))
    n = at.size
    steps = np.arange(n + 1) / n
    return np.sqrt(n) * max((steps[1:] - at).max(), (at - steps[:-1]).max())


def test_zeros_and_constant():
    keys = np.array([-1, 0, 5])
    assert not initial_rows(keys, 4, init_rows.zeros(), SEED).any()
    assert (initial_rows(keys, 4, init_rows.constant(0.1), SEED) == np.float32(0.1)).all()


@pytest.mark.parametrize(
    "initializer",
    [init_rows.uniform(), init_rows.normal(), init_rows.truncated_normal(0.5, 2.0, -1.0, 4.0)],
    ids=repr,
)
def test_a_row_does_not_depend_on_its_batch_nor_a_column_on_the_width(initializer):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100)
    together = initial_rows(keys, 40, initializer, SEED)
    for i in (0, 50, 99):
        assert initial_rows(keys[i : i + 1], 40, initializer, SEED).tobytes() == together[i].tobytes()
    assert (initial_rows(keys, 3, initializer, SEED) == together[:, :3]).all()


def test_some_values_are_pinned_because_every_model_starts_from_them():
    keys = np.array([-(2**63), 0, 7], np.int64)
    drawn = initial_rows(keys, 2, init_rows.normal(), SEED)
    assert drawn.view(np.uint32).tolist() == PINNED


def test_seed_table_key_and_column_all_matter():
    keys = np.arange(1000)
    normal = init_rows.normal()
    base = initial_rows(keys, 8, normal, SEED)
    for other in (table_seed(1, "user"), table_seed(0, "item")):
        again = initial_rows(keys, 8, normal, other)
        assert abs(np.corrcoef(base.ravel(), again.ravel())[0, 1]) < 0.05
    assert np.unique(base).size > 7990


@pytest.mark.parametrize("stride", [1, 1 << 32, 0x1E3779B97F4A7C15])
def test_normal_rows_of_regular_keys_are_normal_and_independent(stride):
    rows = initial_rows((np.arange(20_000) * stride).astype(np.int64), 8, init_rows.normal(2.0, 3.0), SEED)
    z = (rows.astype(np.float64) - 2.0) / 3.0
    n = z.size
    assert abs(z.mean()) < 4 / np.sqrt(n)
    assert abs((z**2).mean() - 1) < 4 * np.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * np.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * np.sqrt(96 / n)
    assert ks_distance(z, NORMAL.cdf) < 1.95
    neighbours = np.corrcoef(z[:-1].T, z[1:].T)
    assert np.abs(neighbours - np.eye(16)).max() < 5 / np.sqrt(20_000)


def test_uniform_rows_are_uniform_and_stay_below_their_upper_end():
    rows = initial_rows(np.arange(20_000), 8, init_rows.uniform(-1.0, 3.0), SEED)
    assert ks_distance(rows, lambda x: (x + 1) / 4) < 1.95
    narrow = initial_rows(np.arange(20_000), 8, init_rows.uniform(1.0, 1.0000002), SEED)
    assert set(np.unique(narrow)) == {np.float32(1.0), np.float32(1.0000001)}
    assert (initial_rows(np.arange(9), 2, init_rows.uniform(0.3, 0.3), SEED) == np.float32(0.3)).all()


def below(x):
    """The standard normal distribution, exact far below zero too."""
    return 0.5 * erfc(-x / sqrt(2))


def truncated_cdf(mean, std, a, b):
    at = [below((x - mean) / std) for x in (a, b)]
    return lambda x: (below((x - mean) / std) - at[0]) / (at[1] - at[0])


def uniform_cdf(low, high):
    return lambda x: (x - low) / (high - low)


@pytest.mark.parametrize(
    ("mean", "std", "a", "b"),
    [(0.0, 1.0, -2.0, 2.0), (0.5, 0.3, 0.0, 1.0), (0.0, 1.0, -9.0, 0.5), (0.0, 1.0, -1.0, 50.0), (2.0, 1.0, 2.0, 2.1)],
)
def test_truncated_normal_rows_are_normal_between_their_ends(mean, std, a, b):
    rows = initial_rows(np.arange(20_000), 8, init_rows.truncated_normal(mean, std, a, b), SEED)
    assert rows.min() >= np.float32(a)
    assert rows.max() <= np.float32(b)
    assert ks_distance(rows, truncated_cdf(mean, std, a, b)) < 1.95
    theirs = torch.nn.init.trunc_normal_(torch.empty(160_000), mean, std, a, b, torch.Generator().manual_seed(1))
    spread = rows.std() / np.sqrt(80_000)
    assert abs(rows.mean(dtype=np.float64) - theirs.double().mean().item()) < 4 * spread + 1e-6
    assert rows.std(dtype=np.float64) == pytest.approx(theirs.double().std().item(), rel=0.02)


def test_far_tails_are_truncated_exactly_too():
    for sign in (-1, 1):
        a, b = sorted((sign * 5.0, sign * 6.0))
        rows = initial_rows(np.arange(5_000), 4, init_rows.truncated_normal(0.0, 1.0, a, b), SEED)
        assert rows.min() >= a
        assert rows.max() <= b
        assert ks_distance(-np.abs(rows), truncated_cdf(0.0, 1.0, -6.0, -5.0)) < 1.95


def test_xavier_scales_with_the_length_of_a_row():
    for dim in (1, 8, 63):
        keys = np.arange(160_000 // dim)
        bound = 2.0 * np.sqrt(6 / (1 + dim))
        uniform = initial_rows(keys, dim, init_rows.xavier_uniform(gain=2.0), SEED)
        assert ks_distance(uniform, uniform_cdf(-bound, bound)) < 1.95
        assert (uniform == initial_rows(keys, dim, init_rows.uniform(-bound, bound), SEED)).all()
        std = np.sqrt(2 / (1 + dim))
        normal = initial_rows(keys, dim, init_rows.xavier_normal(), SEED)
        assert ks_distance(normal / std, NORMAL.cdf) < 1.95


def test_many_rows_with_all_their_tails_are_what_each_is_alone():
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 3000)
    for dim in (1, 7, 700):
        together = initial_rows(keys[: 9000 // dim], dim, init_rows.normal(), SEED)
        alone = [initial_rows(keys[i : i + 1], dim, init_rows.normal(), SEED) for i in range(len(together))]
        assert together.tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: init_rows.truncated_normal(std=0.0), "std=0.0; give a number above zero"),
        (lambda: init_rows.truncated_normal(a=1.0, b=1.0), "a=1.0 is not below b=1.0"),
        (lambda: init_rows.truncated_normal(0.0, 0.1, 5.0, 6.0), "begins 50.0 standard deviations from the mean"),
        (lambda: init_rows.truncated_normal(b=float("inf")), "not a finite number"),
        (lambda: init_rows.xavier_uniform(-1.0), "gain=-1.0 is negative"),
    ],
)
def test_an_initializer_that_cannot_work_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_the_probability_is_the_inverse_of_the_quantile():
    for x in np.linspace(-8.0, 8.0, 81):
        assert probability_below(x) == pytest.approx(below(x), rel=2e-7)


def test_the_normal_quantile_is_right_far_into_its_tails():
    low = 0.5 - MIDDLE
    for p in np.concatenate([np.geomspace(2.0**-53, low, 200, endpoint=False), [2.0**-53]]):
        assert tail_quantile(p) == pytest.approx(NORMAL.inv_cdf(p), rel=2e-9)
    for q in np.linspace(-MIDDLE, MIDDLE, 201):
        assert middle_quantile(q) == pytest.approx(NORMAL.inv_cdf(q + 0.5), rel=2e-9, abs=1e-15)


def test_the_logarithm_is_that_of_the_mathematics():
    for x in np.geomspace(2.0**-53, 1.0, 500):
        assert log_of(x) == pytest.approx(np.log(x), rel=1e-14, abs=1e-15)
