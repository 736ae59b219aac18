"""Datasets of columns in memory (or in memory-mapped files)."""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SAMPLED_BYTES = 1 << 20
_BLOCK_BYTES = 4096


class Bags(NamedTuple):
    """What a `Ragged` column is in a batch: the first two arguments of `EmbeddingBag`, both int64.

    `offsets` has one start a sample and no end, as torch wants it. Write `self.genres(*batch["genres"])`.
    """

    input: "Tensor"
    offsets: "Tensor"


class Ragged:
    """A column of any number of integers a sample: sample *i* has `values[offsets[i]:offsets[i + 1]]`.

    There is one offset more than samples; the first is 0, the last `len(values)`. Empty samples are legal.
    """

    def __init__(self, values: object, offsets: object) -> None:
        """Wrap two arrays or tensors without copying what is int64 already.

        Raises:
            DataError: a wrong type or shape, or offsets that are not as the class says.
        """
        self.values = _int64(values, "values")
        self.offsets = _int64(offsets, "offsets")
        if self.offsets.size == 0:
            raise DataError("Ragged: offsets is empty; it has one entry more than samples, of which the first is 0")
        if self.offsets[0] != 0 or self.offsets[-1] != self.values.size:
            raise DataError(
                f"Ragged: offsets go from {self.offsets[0]} to {self.offsets[-1]}; they must go from 0 to the number "
                f"of values, {self.values.size} (torch's offsets lack the last)"
            )
        drops = np.flatnonzero(self.offsets[1:] < self.offsets[:-1])
        if drops.size:
            raise DataError(f"Ragged: offsets fall after position {drops[0]}; they must never fall")

    @classmethod
    def from_lists(cls, lists: Iterable[Any]) -> "Ragged":
        """Make a column of one list, tuple, array or tensor of integers a sample.

        Raises:
            DataError: an element is not an integer, or a sample not a list.
        """
        try:
            rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in lists]
            values = list(chain.from_iterable(rows))
        except TypeError as exc:
            raise DataError(f"Ragged.from_lists wants one list of integers a sample ({exc})") from exc
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.asarray(values) if values else np.empty(0, np.int64), offsets)

    def __len__(self) -> int:
        """The number of samples."""
        return self.offsets.size - 1

    def take(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The values of samples `ids`, one sample after the other, and where each begins."""
        starts = self.offsets[ids]
        lengths = self.offsets[ids + 1] - starts
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum(), dtype=np.int64) + np.repeat(starts - begins, lengths)
        return self.values[positions], begins


class Columns:
    """A dataset of named columns of equal length: `Columns({"user": users, "genres": Ragged(...), "label": labels})`.

    A column is an array, a tensor, anything numpy makes an array of (a list, a pandas column), or a `Ragged`. A batch
    is a dict of fresh torch tensors of the same names and element types, and of `Bags` for `Ragged` columns.

    The fingerprint covers names, element types, shapes and content: all of a column up to 1 MiB, of a larger one 256
    stretches of 4 KiB spread evenly (two rows at least). It costs a millisecond or two a column, once.
    """

    reads_anywhere = True

    def __init__(self, columns: Mapping[str, Any]) -> None:
        """Wrap columns; arrays are not copied.

        Raises:
            DataError: a column cannot be used, lengths differ, or there is nothing; the text names the column.
        """
        if not isinstance(columns, Mapping):
            raise DataError(f"Columns: {type(columns).__name__} is no mapping of names to arrays; give a dict")
        self._columns = {_name(name): _column(name, column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self._columns.items()}
        if not lengths:
            raise DataError("Columns: there are no columns; give at least one")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise DataError(f"Columns: all columns must have the same number of samples, but {listed}")
        self._samples = next(iter(lengths.values()))
        if self._samples == 0:
            raise DataError(f"Columns: the columns {', '.join(map(repr, lengths))} have no samples")
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        """The number of samples."""
        return self._samples

    def fingerprint(self) -> str:
        """See the class."""
        if self._fingerprint is None:
            digest = blake2b(b"columns", digest_size=16)
            for name, column in sorted(self._columns.items()):
                parts = (column.values, column.offsets) if isinstance(column, Ragged) else (column,)
                for array in parts:
                    digest.update(f"{name!r} {len(parts)} {array.dtype.str[1:]} {array.shape}".encode())
                    digest.update(_sample_bytes(array))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def fetch(self, ids: NDArray[np.int64]) -> "dict[str, Tensor | Bags]":
        """The samples `ids` as a dict of tensors the caller may change."""
        from torch import from_numpy

        if ids.size and not 0 <= ids.min() <= ids.max() < self._samples:
            raise IndexError(f"sample numbers from {ids.min()} to {ids.max()} of {self._samples} samples")
        batch: dict[str, Tensor | Bags] = {}
        for name, column in self._columns.items():
            if isinstance(column, Ragged):
                values, begins = column.take(ids)
                batch[name] = Bags(from_numpy(values), from_numpy(begins))
            else:
                batch[name] = _taken(column, ids)
        return batch


def _taken(column: NDArray[Any], ids: NDArray[np.int64]) -> "Tensor":
    """Rows of a column, in memory of torch's: how it is aligned can show in the last bit of a product."""
    from torch import empty

    rows = empty((ids.size, *column.shape[1:]), dtype=_type_in_torch(column.dtype))
    column.take(ids, axis=0, out=rows.numpy(), mode="clip")  # in any other mode numpy makes a copy on the way
    return rows


@cache
def _type_in_torch(dtype: np.dtype[Any]) -> "torch.dtype":
    from torch import from_numpy

    return from_numpy(np.empty(0, dtype)).dtype


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise DataError(f"Columns: the column name {name!r} is not a string")
    return name


def _column(name: str, column: object) -> NDArray[Any] | Ragged:
    if isinstance(column, Ragged):
        return column
    where = f"column {name!r}"
    array = _array(column, where)
    if array.ndim == 0:
        raise DataError(f"{where} is a single value; it must have one entry a sample")
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise DataError(f"{where} has the element type {array.dtype}, which torch does not know; convert it to numbers")
    return array


def _array(data: object, where: str) -> NDArray[Any]:
    """An array of numbers in the machine's byte order; of strings, objects or ragged lists a DataError."""
    if isinstance(data, np.ma.MaskedArray):
        raise DataError(f"{where} is a masked array; fill its missing values first")
    try:
        array = np.asarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)
    except ValueError as exc:
        raise DataError(f"{where} has entries of different lengths; wrap it in eg.data.Ragged.from_lists(...)") from exc
    except TypeError as exc:
        raise DataError(f"{where} cannot become an array: {exc}") from exc
    if array.dtype.kind in "USTO" and _holds_strings(array):
        raise DataError(f"{where} holds strings; make keys of them with eg.hash_ids(...)")
    if array.dtype.kind == "O":
        raise DataError(f"{where} holds Python objects; convert it to numbers, or lists with eg.data.Ragged.from_lists")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _holds_strings(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "O" or (array.size > 0 and isinstance(array.flat[0], str | bytes))


def _int64(data: object, what: str) -> NDArray[np.int64]:
    array = _array(data, f"Ragged: {what}")
    if array.ndim != 1:
        raise DataError(f"Ragged: {what} has shape {array.shape}; it must be one-dimensional")
    if array.size and (array.dtype.kind not in "iu" or array.dtype == np.uint64):
        raise DataError(f"Ragged: {what} has the element type {array.dtype}; it must be int64 or a smaller integer")
    return array.astype(np.int64, copy=False)


def _sample_bytes(array: NDArray[Any]) -> bytes:
    """Little-endian bytes of the array, or of stretches of it; see `Columns`."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    if array.nbytes > SAMPLED_BYTES:
        rows = max(1, _BLOCK_BYTES // row_bytes)
        stretches = max(2, SAMPLED_BYTES // (rows * row_bytes))
        last = len(array) - rows
        array = np.concatenate([array[s : s + rows] for s in (last * i // (stretches - 1) for i in range(stretches))])
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
