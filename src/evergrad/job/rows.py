"""The rows one batch needs: pulled ahead or when met, given to autograd, their gradients taken back.

A batch may have tens of tables, so what can be done for all of them at once is: the ids pulled ahead are numbered by
one call, their rows read by one, and one node of autograd takes the gradients of all, summed by one call
(`reading.py`). What is met only in `forward` takes the same way alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evergrad.job.held_rows import HeldRows
from evergrad.job.reading import Reading, features_of, flat_ids
from evergrad.job.table_rows import TableRows
from evergrad.kernels.features import Ids, Index, are_numbered, number
from evergrad.kernels.hashing import unique
from evergrad.lookup import Found
from evergrad.messages import Floats, Keys
from evergrad.nn import Table

PullRows = Callable[[int, Keys], Floats]
"""Pulls the rows of different keys of a table."""


class Gradient(NamedTuple):
    """Gradients of different keys of a table, shape (n,) and (n, dim)."""

    table: int
    keys: Keys
    grads: Floats


class _Feature:
    """The ids of one module, numbered ahead. Keeps their tensor, so that no other can come to lie where it does."""

    def __init__(self, module: Table, table: TableRows, ids: Tensor) -> None:
        self.module, self.table, self.ids = module, table, ids
        self.flat = flat_ids(ids)
        self.index: Index = np.empty(0, np.int32)
        self.covers = 0
        """So many first rows of the table are those of this feature; 0: others are among them."""
        self.values: Tensor | None = None
        """What the module gives, once: a script may write into it."""

    @property
    def place(self) -> tuple[str, int, int, int | None]:
        """What the ids are found by."""
        return self.module.table, self.ids.data_ptr(), self.ids.numel(), self.module.padding_idx

    def is_same(self, ids: Tensor) -> bool:
        """Whether these, which are at the same place, are still the ids that were numbered."""
        if ids.dtype != self.ids.dtype or not ids.is_contiguous():
            return False
        return are_numbered(flat_ids(ids).data_ptr(), self.table.keys, self.index, self.module.padding_idx or 0)

    def use(self) -> None:
        """Autograd is given the rows."""
        if self.covers:
            self.table.use_first(self.covers)
        else:
            self.table.use(self.index)


class BatchRows:
    """The rows of all tables in one batch; the `RowSource` of a job's modules.

    Args:
        modules: the model's table modules.
        numbers: each table's number in the schema.
        pull: pulls rows that were not pulled ahead.
        training: whether gradients are wanted.
    """

    def __init__(self, modules: Sequence[Table], numbers: dict[str, int], pull: PullRows, training: bool) -> None:
        self._modules, self._numbers, self._pull, self._training = modules, numbers, pull, training
        self._tables = {m.table: TableRows(m.dim) for m in modules}
        self._features: list[_Feature] = []
        self._ahead: dict[tuple[str, int, int, int | None], _Feature] = {}
        self._wanted: list[tuple[str, Keys]] = []
        self._asked: list[tuple[str, Keys]] = []
        self._held: HeldRows | None = None
        self._reading: Reading | None = None

    def number(self, batch: Any) -> None:
        """Number the ids a batch is known to need."""
        if not isinstance(batch, Mapping):
            return
        met: dict[str, list[_Feature]] = {}
        for module in self._modules:
            ids = module.ids_in(batch)
            if ids is not None and ids.numel():
                met.setdefault(module.table, []).append(_Feature(module, self._tables[module.table], ids))
        if not met:
            return
        self._features = [feature for of_table in met.values() for feature in of_table]
        self._ahead = {feature.place: feature for feature in self._features}
        counts = [feature.ids.numel() for feature in self._features]
        keys, bounds, index = number(features_of([f.table for f in self._features], counts), _ids_of(self._features))
        for feature, count, end in zip(self._features, counts, np.cumsum(counts).tolist(), strict=True):
            feature.index = index[end - count : end]
        for of_table, (start, stop) in zip(met.values(), pairwise(bounds.tolist()), strict=True):
            self._wanted.append((of_table[0].module.table, keys[start:stop]))
            if len(of_table) == 1:
                of_table[0].covers = stop - start

    def wanted(self, held: HeldRows | None = None) -> list[tuple[int, Keys]]:
        """The different keys to pull, by table; their rows are given to `take`.

        Args:
            held: rows that are used as they are, and that pulled ones are added to.
        """
        self._held, self._asked = held, self._wanted
        if held is not None:
            new = [(table, held[table].ask(keys)) for table, keys in self._wanted]
            self._asked = [(table, keys) for table, keys in new if keys.size]
        return [(self._numbers[table], keys) for table, keys in self._asked]

    def take(self, rows: Sequence[Floats]) -> None:
        """The rows `wanted` asked for."""
        if self._held is None:
            for (table, keys), of_table in zip(self._asked, rows, strict=True):
                self._tables[table].add(keys, of_table)
        else:
            for (table, keys), of_table in zip(self._asked, rows, strict=True):
                self._held[table].add(keys, of_table)
            for table, keys in self._wanted:
                self._tables[table].add(keys, self._pulled(table, keys))
        if read := [feature for feature in self._features if not feature.module.is_pooled]:
            self._reading = Reading([f.table for f in read], [f.index for f in read], [f.ids.shape for f in read])
            for feature, values in zip(read, self._reading.values(), strict=True):
                feature.values = values

    def embed(self, table: str, ids: Tensor, padding: int | None) -> Tensor:
        """One row for each id; pulls those not here yet."""
        feature = self._find_ahead(table, ids, padding)
        is_tracked = self._training and torch.is_grad_enabled()
        if feature is None or feature.values is None or is_tracked != self._training:
            values = self._read(table, ids, self._index(table, ids, padding), is_tracked)
        else:
            if is_tracked:
                self._track_ahead()
                feature.use()
            values, feature.values = feature.values, None
        if values.shape[:-1] != ids.shape:  # the same ids in another shape
            values = values.reshape(*ids.shape, values.shape[-1])
        return values if ids.is_cpu else values.to(ids.device)

    def find(self, table: str, ids: Tensor, padding: int | None) -> Found:
        """Where ids read; pulls the rows of those not here yet."""
        feature = self._find_ahead(table, ids, padding)
        index = self._index(table, ids, padding) if feature is None else feature.index
        rows = self._tables[table]
        if torch.is_grad_enabled():
            rows.use(index)
        number = torch.from_numpy(index.astype(np.int64)).reshape(ids.shape)
        collect = (lambda grads: rows.collect(grads.numpy())) if self._training else None
        return Found(rows.tensor(), number, padding is not None, collect)

    def gradients(self) -> list[Gradient]:
        """The gradients that have reached tables, in the schema's order of tables."""
        found = ((self._numbers[name], rows.gradient()) for name, rows in self._tables.items())
        return sorted((Gradient(number, *g) for number, g in found if g is not None), key=lambda g: g.table)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for rows in self._tables.values():
            rows.zero_grad()

    def renew(self, read: PullRows) -> None:
        """The rows have changed; those used again are read anew."""
        for name, rows in self._tables.items():
            rows.renew(partial(read, self._numbers[name]))
        for feature in self._features:
            feature.values = None

    def _pulled(self, table: str, keys: Keys) -> Floats:
        """The rows of different keys, held or pulled now."""

        def pull(missing: Keys) -> Floats:
            return self._pull(self._numbers[table], missing)

        return pull(keys) if self._held is None else self._held[table].read(keys, pull)

    def _find_ahead(self, table: str, ids: Tensor, padding: int | None) -> _Feature | None:
        feature = self._ahead.get((table, ids.data_ptr(), ids.numel(), padding))
        return feature if feature is not None and feature.is_same(ids) else None

    def _index(self, table: str, ids: Tensor, padding: int | None) -> Index:
        """The number of each id's row; pulls the rows of those not here yet."""
        flat = flat_ids(ids).reshape(-1).numpy()
        index = np.full(flat.size, -1, np.int32)
        is_key = np.ones(flat.size, np.bool_) if padding is None else flat != padding
        keys, inverse = unique(flat[is_key])
        rows = self._tables[table]
        found = rows.find(keys)
        if (found < 0).any():
            missing = keys[found < 0]
            rows.add(missing, self._pulled(table, missing))
            found = rows.find(keys)
        index[is_key] = found[inverse]
        return index

    def _read(self, table: str, ids: Tensor, index: Index, is_tracked: bool) -> Tensor:
        reading = Reading([self._tables[table]], [index], [ids.shape])
        (values,) = reading.values()
        if is_tracked:
            self._tables[table].use(index)
            (values,) = reading.tracked([values])
        return values

    def _track_ahead(self) -> None:
        """Make what was read ahead known to autograd."""
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        read = [(feature, feature.values) for feature in self._features if feature.values is not None]
        for (feature, _), values in zip(read, reading.tracked([values for _, values in read]), strict=True):
            feature.values = values


def _ids_of(features: Sequence[_Feature]) -> Ids:
    paddings = [feature.module.padding_idx for feature in features]
    return Ids(
        np.array([feature.flat.data_ptr() for feature in features]),
        np.array([padding or 0 for padding in paddings]),
        np.array([padding is not None for padding in paddings]),
    )
