"""The rows one batch needs: pulled ahead or when met, given to autograd, their gradients taken back."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evergrad.kernels.hashing import unique
from evergrad.messages import Floats, Keys, TableSpec
from evergrad.nn import Found, Table

PullRows = Callable[[int, Keys], Floats]
"""Pulls the rows of different keys of a table."""


class Gradient(NamedTuple):
    """Gradients of different keys of a table, shape (n,) and (n, dim)."""

    table: int
    keys: Keys
    grads: Floats


class _Ahead(NamedTuple):
    """Ids whose rows were pulled ahead. Keeps the tensor, so that no other can come to lie where it does."""

    ids: Tensor
    rows: NDArray[np.int64]


class _Numbered:
    """Different keys, numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.keys = np.zeros(0, np.int64)
        self._sorter: NDArray[np.intp] = np.zeros(0, np.intp)

    def add(self, keys: Keys) -> None:
        """Keys that are not here yet."""
        self.keys = np.concatenate([self.keys, keys]) if self.keys.size else keys
        self._sorter = np.zeros(0, np.intp)

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The numbers of these keys, -1 of those that are not here. Cost: a sort, and a search per key."""
        if self.keys.size == 0:
            return np.full(keys.size, -1)
        if self._sorter.size == 0:
            self._sorter = np.argsort(self.keys, kind="stable")
        at = np.searchsorted(self.keys, keys, sorter=self._sorter)
        number = self._sorter[np.minimum(at, self.keys.size - 1)]
        return np.where(self.keys[number] == keys, number, -1)


class _HeldTable:
    """The rows of one table that are held; `asked` are those and the ones on their way."""

    def __init__(self, dim: int) -> None:
        self._asked, self._here = _Numbered(), _Numbered()
        self._rows: Floats = np.zeros((0, dim), np.float32)

    def ask(self, keys: Keys) -> Keys:
        """Those of different keys that have not been asked for; they are now."""
        new = keys[self._asked.find(keys) < 0]
        self._asked.add(new)
        return new

    def add(self, keys: Keys, rows: Floats) -> None:
        """Rows that have come; one that is here already stays as it is."""
        is_new = self._here.find(keys) < 0
        self._here.add(keys[is_new])
        self._rows = np.concatenate([self._rows, rows[is_new]])

    def read(self, keys: Keys, pull: Callable[[Keys], Floats]) -> Floats:
        """The rows of different keys; those not here are pulled and stay."""
        missing = keys[self._here.find(keys) < 0]
        if missing.size:
            self.add(missing, pull(missing))
        rows: Floats = self._rows[self._here.find(keys)]
        return rows


class HeldRows:
    """Rows pulled once for several batches, each of which finds them as they came.

    Cost: the different rows of those batches with their keys, besides what each batch takes for itself.
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self._tables = {spec.name: _HeldTable(spec.dim) for spec in tables}
        self._is_begun = False

    def __getitem__(self, table: str) -> _HeldTable:
        return self._tables[table]

    def begin(self) -> bool:
        """A batch is about to ask for what it needs; returns whether one has before."""
        is_begun, self._is_begun = self._is_begun, True
        return is_begun


class _TableRows:
    """The rows of one table in one batch, in the order in which their keys were first met."""

    def __init__(self, dim: int, training: bool) -> None:
        self._dim, self._training = dim, training
        self._known = _Numbered()
        self._leaves: list[Tensor] = []
        self._ahead: dict[tuple[int, int], _Ahead] = {}
        self._used: list[NDArray[np.int64]] = []
        self._read_anew: Callable[[Keys], Floats] | None = None

    def add(self, keys: Keys, rows: Floats) -> None:
        """Rows of keys that are not here yet, shape (n, dim).

        They are copied into memory of torch's: how it is aligned can show in the last bit of what is computed.
        """
        if keys.size == 0:
            return
        leaf = torch.empty(rows.shape, dtype=torch.float32)
        leaf.numpy()[:] = rows
        self._leaves.append(leaf.requires_grad_(self._training))
        self._known.add(keys)

    def remember(self, ids: Tensor, index: NDArray[np.int64]) -> None:
        """These ids, just as they are, have these rows."""
        self._ahead[ids.data_ptr(), ids.numel()] = _Ahead(ids, index)

    def ahead(self, ids: Tensor, keys: Keys) -> NDArray[np.int64] | None:
        """The rows of ids that were pulled ahead, if these are in the same memory and still the same `keys`."""
        found = self._ahead.get((ids.data_ptr(), ids.numel())) if ids.is_contiguous() else None
        return found.rows if found is not None and np.array_equal(self._known.keys[found.rows], keys) else None

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The numbers of the rows of these keys, -1 where there is none."""
        return self._known.find(keys)

    def use(self, index: NDArray[np.int64]) -> Tensor:
        """The rows as autograd sees them; those numbered in `index` are used, unless gradients are off."""
        if self._read_anew is not None:
            self._reload(self._read_anew)
        if torch.is_grad_enabled():
            self._used.append(index)
        if not self._leaves:
            return torch.zeros(0, self._dim)
        return self._leaves[0] if len(self._leaves) == 1 else torch.cat(self._leaves)

    def gradient(self) -> tuple[Keys, Floats] | None:
        """Keys that were used and their gradients; None if no gradient has reached this table."""
        if not any(leaf.grad is not None for leaf in self._leaves):
            return None
        parts = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self._leaves]
        grads: Floats = (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()
        used = np.zeros(self._known.keys.size, np.bool_)
        for index in self._used:
            used[index] = True
        return (self._known.keys, grads) if used.all() else (self._known.keys[used], grads[used])

    def renew(self, read: Callable[[Keys], Floats]) -> None:
        """The rows have changed; they are read anew if they are used again."""
        self._read_anew = read

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for leaf in self._leaves:
            leaf.grad = None

    def _reload(self, read: Callable[[Keys], Floats]) -> None:
        rows, start, self._read_anew = read(self._known.keys), 0, None
        for leaf in self._leaves:
            leaf.detach().numpy()[:] = rows[start : start + len(leaf)]
            start += len(leaf)


class BatchRows:
    """The rows of all tables in one batch; the `RowSource` of a job's modules.

    Args:
        modules: the model's table modules.
        numbers: each table's number in the schema.
        pull: pulls rows that were not pulled ahead.
        training: whether gradients are wanted.
        held: rows that are used as they are, and that pulled ones are added to.
    """

    def __init__(
        self,
        modules: Sequence[Table],
        numbers: dict[str, int],
        pull: PullRows,
        training: bool,
        held: HeldRows | None = None,
    ) -> None:
        self._modules, self._numbers, self._pull, self._held = modules, numbers, pull, held
        self._tables = {m.table: _TableRows(m.dim, training) for m in modules}
        self._wanted: list[tuple[str, Keys]] = []
        self._asked: list[tuple[str, Keys]] = []

    def wanted(self, batch: Any) -> list[tuple[int, Keys]]:
        """The different keys to pull for a batch, by table; their rows are given to `take`."""
        met: dict[str, list[Tensor]] = {}
        for module in self._modules:
            ids = module.ids_in(batch)
            if ids is not None and ids.numel():
                real = ids if module.padding_idx is None else ids[ids != module.padding_idx]
                met.setdefault(module.table, []).append(real.contiguous())
        for table, tensors in met.items():
            keys, index = unique(_flat(tensors))
            start = 0
            for ids in tensors:
                self._tables[table].remember(ids, index[start : start + ids.numel()].astype(np.int64))
                start += ids.numel()
            self._wanted.append((table, keys))
        if self._held is None:
            self._asked = self._wanted
        else:
            new = [(table, self._held[table].ask(keys)) for table, keys in self._wanted]
            self._asked = [(table, keys) for table, keys in new if keys.size]
        return [(self._numbers[table], keys) for table, keys in self._asked]

    def take(self, rows: Sequence[Floats]) -> None:
        """The rows `wanted` asked for."""
        if self._held is None:
            for (table, keys), of_table in zip(self._asked, rows, strict=True):
                self._tables[table].add(keys, of_table)
            return
        for (table, keys), of_table in zip(self._asked, rows, strict=True):
            self._held[table].add(keys, of_table)
        for table, keys in self._wanted:
            self._tables[table].add(keys, self._read(table, keys))

    def _read(self, table: str, keys: Keys) -> Floats:
        """The rows of different keys, held or pulled now."""

        def pull(missing: Keys) -> Floats:
            return self._pull(self._numbers[table], missing)

        return pull(keys) if self._held is None else self._held[table].read(keys, pull)

    def lookup(self, table: str, ids: Tensor) -> Found:
        """The rows of these ids; pulls those not here yet."""
        rows = self._tables[table]
        flat = _flat([ids])
        index = rows.ahead(ids, flat)
        if index is None:
            keys, inverse = unique(flat)
            found = rows.find(keys)
            if (found < 0).any():
                missing = keys[found < 0]
                rows.add(missing, self._read(table, missing))
                found = rows.find(keys)
            index = found[inverse]
        return Found(rows.use(index), torch.from_numpy(index).reshape(ids.shape))

    def gradients(self) -> list[Gradient]:
        """The gradients that have reached tables, in the schema's order of tables."""
        found = ((self._numbers[name], rows.gradient()) for name, rows in self._tables.items())
        return sorted((Gradient(number, *g) for number, g in found if g is not None), key=lambda g: g.table)

    def renew(self, read: PullRows) -> None:
        """The rows have changed; those used again are read anew."""
        for name, rows in self._tables.items():
            rows.renew(partial(read, self._numbers[name]))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for rows in self._tables.values():
            rows.zero_grad()


def _flat(tensors: Sequence[Tensor]) -> Keys:
    """All ids one after the other, on this machine's memory, as int64."""
    flat = [t.detach().reshape(-1).cpu().to(torch.int64) for t in tensors]
    keys: Keys = (flat[0] if len(flat) == 1 else torch.cat(flat)).numpy()
    return np.ascontiguousarray(keys)
