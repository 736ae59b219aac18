"""Metrics made of partial results that add up.

`fn` of `job.evaluate` returns one partial result a batch; the master adds them in the order of the tasks and every
trainer gets the same totals. `mean` and `auc` make partial results, a plain number or array is a sum. Values may be
torch tensors, arrays or numbers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergrad.errors import DataError
from evergrad.messages import Numbers, Partial

_SUM, _MEAN, _AUC = "sum", "mean", "auc"
_DROPPED_BITS = 12


def mean(values: Any, weights: Any = None) -> Partial:
    """The mean of all values of all batches, each counting once or by its weight; nan if there are none.

    Give one value a sample, or a batch's mean with `weights=len(batch)`: means of batches alone would count a last
    small batch as a full one.

    Raises:
        DataError: weights of another shape than values, or something that is not numbers.
    """
    numbers = _numbers(values, "metrics.mean: values")
    if weights is None:
        return Partial(_MEAN, np.array([numbers.sum(), numbers.size], np.float64))
    by = _numbers(weights, "metrics.mean: weights")
    if by.shape != numbers.shape:
        raise DataError(f"metrics.mean: values have shape {numbers.shape}, weights {by.shape}; they must be the same")
    return Partial(_MEAN, np.array([(numbers * by).sum(), by.sum()], np.float64))


def auc(scores: Any, labels: Any) -> Partial:
    """The area under the ROC curve of all samples of all batches; nan while only one class was seen.

    Scores are compared as float32 numbers cut to their upper 20 bits, so scores within one part in 2,048 of each other
    may tie, and ties count half. The result differs from the exact one by less than 1e-4 unless nearly all scores lie
    within one part in a hundred of each other; give logits then, not probabilities. The counts are exact, so it does
    not matter how samples fall into batches. A partial result has at most one entry of 24 bytes a sample, and 2**20.

    Args:
        scores: any finite or infinite numbers, logits or probabilities.
        labels: 0 or 1 each, as many as scores.

    Raises:
        DataError: a score is nan, a label is not 0 or 1, or their numbers differ.
    """
    values, truth = _numbers(scores, "metrics.auc: scores").ravel(), _numbers(labels, "metrics.auc: labels").ravel()
    if values.size != truth.size:
        raise DataError(f"metrics.auc: there are {values.size} scores and {truth.size} labels; give one label a score")
    if np.isnan(values).any():
        raise DataError("metrics.auc: a score is nan; has training diverged?")
    if not np.isin(truth, (0.0, 1.0)).all():
        raise DataError("metrics.auc: labels must be 0 or 1")
    return Partial(_AUC, _summed(np.stack([_bins(values), truth, 1.0 - truth])))


def partial(value: Any) -> Partial:
    """What a script's function returned, as a partial result: numbers, arrays and tensors are sums.

    Raises:
        DataError: it is not a partial result, a number, an array or a tensor.
    """
    return value if isinstance(value, Partial) else Partial(_SUM, _numbers(value, "a metric").copy())


def merge(a: Partial, b: Partial) -> Partial:
    """The sum of two partial results of one metric.

    Raises:
        DataError: they are of different kinds or shapes, or of none that there is.
    """
    if a.kind != b.kind:
        raise DataError(f"a metric is a {a.kind!r} in one batch and a {b.kind!r} in another; it must be one kind")
    _check(a)
    _check(b)
    if a.kind == _AUC:
        return Partial(_AUC, _summed(np.concatenate([a.values, b.values], axis=1)))
    if a.values.shape != b.values.shape:
        raise DataError(f"a metric has shape {a.values.shape} in one batch and {b.values.shape} in another")
    return Partial(a.kind, np.asarray(a.values + b.values))


def result(total: Partial) -> float | Numbers:
    """The metric of all samples merged into `total`: a number, or an array for a sum of arrays.

    Raises:
        DataError: the kind is unknown or the values do not belong to it.
    """
    _check(total)
    values = total.values
    if total.kind == _AUC:
        return _area(values[1], values[2])
    if total.kind == _MEAN:
        return float(values[0] / values[1]) if values[1] else float("nan")
    return float(values) if values.ndim == 0 else values.copy()


def _check(part: Partial) -> None:
    shape = part.values.shape
    if part.kind not in (_SUM, _MEAN, _AUC):
        raise DataError(f"there is no metric of the kind {part.kind!r}")
    if (part.kind == _MEAN and shape != (2,)) or (part.kind == _AUC and (len(shape) != 2 or shape[0] != 3)):
        raise DataError(f"a metric of the kind {part.kind!r} cannot have values of shape {shape}")


def _numbers(values: Any, what: str) -> Numbers:
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values)
    except ValueError as exc:
        raise DataError(f"{what} have no single shape; give a number, an array or a tensor") from exc
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what}: {type(values).__name__} is neither a number nor an array or tensor of them")
    return array.astype(np.float64, copy=False)


def _bins(scores: Numbers) -> Numbers:
    """Numbers that order as the scores do, equal for scores whose float32 forms share their upper bits."""
    with np.errstate(over="ignore", under="ignore"):
        bits = (scores.astype(np.float32) + np.float32(0.0)).view(np.int32)  # adding 0 makes -0.0 one with 0.0
    ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return (ordered >> _DROPPED_BITS).astype(np.float64)


def _summed(counts: NDArray[np.float64]) -> Numbers:
    """Rows (bin, positives, negatives) sorted by bin, one column a bin."""
    order = np.argsort(counts[0], kind="stable")
    counts = counts[:, order]
    first = np.flatnonzero(np.diff(counts[0], prepend=-np.inf))
    if first.size == 0:
        return np.zeros((3, 0))
    return np.stack([counts[0, first], *np.add.reduceat(counts[1:], first, axis=1)])


def _area(positives: Numbers, negatives: Numbers) -> float:
    pairs = float(positives.sum() * negatives.sum())
    if pairs == 0:
        return float("nan")
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs)
