"""What a dataset is, and what else may be given for one."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from evergrad.data.columns import Columns
from evergrad.data.map import Map
from evergrad.errors import DataError


@runtime_checkable
class Dataset(Protocol):
    """A fixed number of samples that can be read by number, in any order, again and again.

    A dataset that draws no random numbers and may be read in another thread than the script's has an attribute
    `reads_anywhere` that is true: its batches are read ahead while others are computed.
    """

    def __len__(self) -> int:
        """The number of samples; it never changes."""
        ...

    def fingerprint(self) -> str:
        """A short text that is the same for the same data in every process, and as a rule differs for other data.

        All trainers of a job must report the same one. It is asked for at every loop over the data: keep it.
        """
        ...

    def fetch(self, ids: NDArray[np.int64]) -> Any:
        """The batch of the samples `ids`, shape (n,), in this order; what it is, is up to the dataset."""
        ...


def as_dataset(data: object) -> Dataset:
    """Take what a script gives as data: a `Dataset`, a mapping of arrays, or a map-style torch dataset.

    Raises:
        DataError: it is none of these, or cannot be used.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Mapping):
        return Columns(data)
    if hasattr(data, "keys") and hasattr(data, "__getitem__"):  # a DataFrame is one
        names = data.keys()
        return Columns({name: data[name] for name in names})
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        return Map(data)
    raise DataError(
        f"{type(data).__name__} cannot be read by sample number: give a mapping of arrays, a dataset of eg.data, or a "
        "torch dataset with __len__ and __getitem__ (of a DataLoader, its dataset)"
    )


def reads_anywhere(data: Dataset) -> bool:
    """Whether a dataset says of itself that it may be read in another thread."""
    return getattr(data, "reads_anywhere", False) is True
