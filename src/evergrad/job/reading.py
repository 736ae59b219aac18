"""Rows read for many ids at once, and their gradients summed at once."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evergrad.job.table_rows import TableRows
from evergrad.kernels.arrays import Integers, address_of
from evergrad.kernels.features import Features, Index, gather
from evergrad.kernels.segment import sum_rows
from evergrad.lookup import tracked


class Reading:
    """Features whose rows are read at once: one vector for each id.

    Args:
        tables: the table of each feature; those of one table stand side by side.
        index: for each feature which row each of its ids reads; negative: none, zeros.
        shapes: the shape of the ids of each feature.
    """

    def __init__(self, tables: Sequence[TableRows], index: Sequence[Index], shapes: Sequence[torch.Size]) -> None:
        self._tables, self._index, self._shapes = list(dict.fromkeys(tables)), index, shapes
        self._features = features_of(tables, [numbers.size for numbers in index])
        self._rows = np.array([table.keys.size for table in self._tables])
        self._numbers = np.array([address_of(numbers) for numbers in index])

    def values(self) -> list[Tensor]:
        """What is read, for each feature in the shape of its ids."""
        dims = self._features.dims.tolist()
        out = [torch.empty((*shape, dim), dtype=torch.float32) for shape, dim in zip(self._shapes, dims, strict=True)]
        rows = [table.rows() for table in self._tables]
        gather(self._features, self._numbers, np.array([address_of(r) for r in rows]), _addresses(out))
        return out

    def tracked(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What was read, as autograd sees it."""
        return tracked(values, self._collect)

    def _collect(self, grads: Sequence[Tensor | None]) -> None:
        rows = [grad if grad is None else _as_rows(grad) for grad in grads]
        strides = np.array([0 if grad is None else grad.stride(0) for grad in rows])
        sums, bounds = sum_rows(self._features, self._numbers, self._rows, _addresses(rows), strides)
        tables = self._features.tables.tolist()
        for number in dict.fromkeys(t for t, grad in zip(tables, rows, strict=True) if grad is not None):
            table = self._tables[number]
            table.collect(sums[bounds[number] : bounds[number + 1]].reshape(-1, table.dim))


def features_of(tables: Sequence[TableRows], counts: Sequence[int]) -> Features:
    """Features of these tables, each of so many ids; those of one table stand side by side."""
    numbers = {table: number for number, table in enumerate(dict.fromkeys(tables))}
    of_feature = [numbers[table] for table in tables]
    return Features(np.array(counts), np.array(of_feature), np.array([table.dim for table in tables]))


def flat_ids(ids: Tensor) -> Tensor:
    """The ids as int64, one after the other in this machine's memory; the same tensor if it is that already."""
    if ids.is_cpu and ids.dtype == torch.int64 and ids.is_contiguous():
        return ids
    return ids.to("cpu", torch.int64).contiguous()


def _as_rows(grad: Tensor) -> Tensor:
    """A gradient as (n, dim), each row without gaps."""
    flat = grad.reshape(-1, grad.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _addresses(tensors: Sequence[Tensor | None]) -> Integers:
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
