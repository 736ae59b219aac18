"""One place's part of a model: its tables and its spans of the dense groups, and how an update changes them."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from evergrad.checkpoint.pieces import PIECE_BYTES, DensePiece, Piece, RowsPiece
from evergrad.errors import CheckpointError
from evergrad.messages import AnyArray, ExportPart, Floats, GroupGrads, Schema, TableGrads, TableKeys
from evergrad.placement import slots_owned, span_owned
from evergrad.pserver.cut import TableCut
from evergrad.pserver.dense import DenseGroup
from evergrad.pserver.table import Table

INDEX_BYTES = 40
"""What a row takes besides itself, at most."""
SUM_BYTES = 12
"""What the sum and the mean of a gradient's element take while they are made."""


class Contribution(NamedTuple):
    """What one batch brings to an update."""

    samples: int
    tables: Sequence[TableGrads]
    groups: Sequence[GroupGrads]
    evict: Sequence[TableKeys] = ()


class Model:
    """The rows and dense values of one place.

    Args:
        schema: the model.
        place: which part of it.
        places: of how many.
    """

    def __init__(self, schema: Schema, place: int, places: int) -> None:
        slots = slots_owned(place, places)
        self._schema = schema
        self._tables = [Table(spec, schema.seed, slots) for spec in schema.tables]
        self._row_bytes = [4 * spec.dim * (1 + spec.rule.state_width) + INDEX_BYTES for spec in schema.tables]
        self._dims = [spec.dim for spec in schema.tables]
        spans = [span_owned(spec.size, place, places) for spec in schema.groups]
        self._groups = [DenseGroup(spec, span) for spec, span in zip(schema.groups, spans, strict=True)]
        self._slots_missing = [len(slots)] * len(schema.tables)
        self._elements_missing = [len(span) for span in spans]

    def rows(self, asked: Sequence[TableKeys], evaluating: bool) -> tuple[Floats, ...]:
        """The rows of these keys, shape (n, dim) each; an unseen key is answered with its first value and not made.

        They lie side by side in one array, so that they go out as one.
        """
        room = np.empty(sum(a.keys.size * self._dims[a.table] for a in asked), np.float32)
        rows, start = [], 0
        for a in asked:
            stop = start + a.keys.size * self._dims[a.table]
            out = room[start:stop].reshape(a.keys.size, self._dims[a.table])
            rows.append(self._tables[a.table].pull(a.keys, evaluating, out))
            start = stop
        return tuple(rows)

    def span(self, group: int) -> AnyArray:
        """This place's span of a dense group; never changed afterwards."""
        return self._groups[group].values

    def bytes_needed(self, tables: Sequence[TableGrads]) -> int:
        """At most so many bytes beyond the gradients themselves does it take to apply them: rows, index and sums.

        A row that a cut has copied aside is none that is made.
        """
        return sum(t.keys.size * (self._row_bytes[t.table] + SUM_BYTES * t.grads.shape[1]) for t in tables)

    def row_counts(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(len(table) for table in self._tables)

    def export(self, table: int, part: ExportPart, slot: int, limit: int) -> tuple[AnyArray, int | None]:
        """A piece of a table and the slot the next piece starts at; see `Table.export`."""
        return self._tables[table].export(part, slot, limit)

    def set_dense(self, groups: Iterable[GroupGrads]) -> None:
        """Take these as the initial values."""
        for span in groups:
            self._groups[span.group].set(span.values)

    def update(self, contributions: Sequence[Contribution]) -> None:
        """Apply the mean over all samples, summed in the order given; the first contribution's rates count.

        A table named by any contribution counts one update, also where it has no keys here. Rows to be evicted go
        first.
        """
        for evicted in (e for c in contributions for e in c.evict):
            self._tables[evicted.table].evict(evicted.keys)
        total = sum(c.samples for c in contributions)
        rows: dict[int, list[tuple[int, TableGrads]]] = {}
        spans: dict[int, list[tuple[int, GroupGrads]]] = {}
        for samples, tables, groups, _ in contributions:
            for t in tables:
                rows.setdefault(t.table, []).append((samples, t))
            for g in groups:
                spans.setdefault(g.group, []).append((samples, g))
        for table, named in rows.items():
            self._tables[table].update([(t.keys, t.grads, n) for n, t in named], total, named[0][1].lr)
        for group, parts in spans.items():
            self._groups[group].update([(g.values, g.present, n) for n, g in parts], total, parts[0][1].lr)

    def cut(self) -> "ModelCut":
        """All of it as it is now; one cut at a time.

        Raises:
            MemoryError: the system refuses what that takes.
        """
        return ModelCut(self._schema, self._tables, self._groups)

    def begin_load(self, updates: dict[str, int]) -> None:
        """The tables were updated so often; then come pieces."""
        for spec, table in zip(self._schema.tables, self._tables, strict=True):
            table.set_updates(updates.get(spec.name, 0))

    def load(self, piece: Piece) -> None:
        """Take a piece, each once and in any order.

        Raises:
            CheckpointError: it does not fit.
        """
        match piece:
            case RowsPiece():
                self._tables[piece.table].load(piece)
                self._slots_missing[piece.table] -= len(piece.slots)
            case DensePiece():
                self._groups[piece.group].load(piece)
                self._elements_missing[piece.group] -= len(piece.span)

    def check_loaded(self) -> None:
        """See that pieces of everything came.

        Raises:
            CheckpointError: some did not.
        """
        for spec, slots in zip(self._schema.tables, self._slots_missing, strict=True):
            if slots:
                raise CheckpointError(f"the checkpoint lacks {slots} slots of table {spec.name!r}")
        for number, elements in enumerate(self._elements_missing):
            if elements:
                raise CheckpointError(f"the checkpoint lacks {elements} elements of dense group {number}")

    def load_bytes(self, piece: Piece) -> int:
        """How much memory it takes to load a piece, besides its own."""
        match piece:
            case RowsPiece():
                row_bytes = self._row_bytes[piece.table]
                return piece.keys.size * row_bytes + piece.candidates.size * INDEX_BYTES
            case DensePiece():
                return 0


class ModelCut:
    """A model as it was when this was made, handed out piece by piece: dense groups first, then tables."""

    def __init__(self, schema: Schema, tables: Sequence[Table], groups: Sequence[DenseGroup]) -> None:
        self.updates = {spec.name: table.updates for spec, table in zip(schema.tables, tables, strict=True)}
        """How often each table was updated."""
        self._dense = deque(p for number, group in enumerate(groups) for p in group.cut(number, PIECE_BYTES))
        self._tables: deque[Table] = deque()
        self._over: deque[TableCut] = deque()
        try:
            for number, table in enumerate(tables):
                if table.begin_cut(number):
                    self._tables.append(table)
        except MemoryError:
            self.end()
            raise

    @property
    def is_handed_out(self) -> bool:
        """Whether nothing is left."""
        return not self._dense and not self._tables

    def advance(self, slice_bytes: int) -> Piece | None:
        """Copy about so many bytes more; returns a piece of about `PIECE_BYTES` when one is complete."""
        if self._dense:
            return self._dense.popleft()
        piece, is_last = self._tables[0].advance_cut(PIECE_BYTES, slice_bytes)
        if is_last:
            self._end_table(self._tables.popleft())
        return piece

    def end(self) -> None:
        """Hand out nothing more, keep nothing for it."""
        self._dense.clear()
        while self._tables:
            self._end_table(self._tables.popleft())

    def release(self) -> bool:
        """Give back a little of the memory of tables handed out; returns whether there is more to give back."""
        if self._over and not self._over[0].release():
            self._over.popleft()
        return bool(self._over)

    def _end_table(self, table: Table) -> None:
        if (ended := table.end_cut()) is not None:
            self._over.append(ended)
