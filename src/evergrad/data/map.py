"""Any map-style torch dataset."""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergrad.errors import DataError

CollateFn = Callable[[Any], Any]


class Map:
    """A map-style torch dataset: an object with `__len__` and `__getitem__`.

    A batch is `collate_fn` of the list of samples, torch's `default_collate` if none is given. Where the dataset has
    `__getitems__` its answer to the list of ids is what is collated, as in a `DataLoader`.

    The fingerprint covers the number of samples, the name of the dataset's type and how the first sample is built
    (types, keys, element types), but no values: a dataset may well transform its samples at random.
    """

    def __init__(self, dataset: Any, collate_fn: CollateFn | None = None) -> None:
        """Wrap a dataset.

        Raises:
            DataError: it has no `__len__` or `__getitem__`, or no samples.
        """
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"eg.data.Map: {type(dataset).__name__} lacks __len__ or __getitem__; an iterable dataset cannot be "
                "read by sample number"
            )
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._samples = len(dataset)
        self._fingerprint: str | None = None
        if self._samples == 0:
            raise DataError(f"eg.data.Map: the {type(dataset).__name__} has no samples")

    def __len__(self) -> int:
        """The number of samples."""
        return self._samples

    def fingerprint(self) -> str:
        """See the class. Reads the first sample, once."""
        if self._fingerprint is None:
            text = f"map {self._samples} {type(self._dataset).__qualname__} {_form(self._dataset[0])}"
            self._fingerprint = blake2b(text.encode(), digest_size=16).hexdigest()
        return self._fingerprint

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        """The collated samples `ids`. What the dataset raises goes through."""
        numbers: list[int] = ids.tolist()
        if getattr(self._dataset, "__getitems__", None) is not None:
            samples = self._dataset.__getitems__(numbers)
        else:
            samples = [self._dataset[i] for i in numbers]
        if self._collate_fn is not None:
            return self._collate_fn(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)


def _form(sample: object) -> str:
    """How a sample is built, as text."""
    name = type(sample).__qualname__
    if isinstance(sample, Mapping):
        return f"{name}{{{','.join(f'{key}:{_form(value)}' for key, value in sample.items())}}}"
    if isinstance(sample, tuple):
        return f"{name}({','.join(_form(value) for value in sample)})"
    return f"{name}[{getattr(sample, 'dtype', '')}]"
