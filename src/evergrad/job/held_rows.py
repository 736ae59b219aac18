"""Rows that several batches use as they came."""

from collections.abc import Callable, Sequence

import numpy as np

from evergrad.job.table_rows import Numbered
from evergrad.messages import Floats, Keys, TableSpec


class _HeldTable:
    """The rows of one table that are held; `asked` are those and the ones on their way."""

    def __init__(self, dim: int) -> None:
        self._asked, self._here = Numbered(), Numbered()
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
