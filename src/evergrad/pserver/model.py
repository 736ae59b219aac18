"""One place's part of a model: its tables and its spans of the dense groups, and how an update changes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from evergrad.messages import AnyArray, ExportPart, GroupGrads, Keys, Schema, TableGrads, TableKeys
from evergrad.placement import slots_owned, span_owned
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
        self._tables = [Table(spec, schema.seed, slots, schema.wire) for spec in schema.tables]
        self._row_bytes = [4 * spec.dim * (1 + spec.rule.state_width) + INDEX_BYTES for spec in schema.tables]
        self._sum_bytes = [SUM_BYTES * spec.dim for spec in schema.tables]
        self._groups = [DenseGroup(spec, span_owned(spec.size, place, places)) for spec in schema.groups]

    def rows(self, table: int, keys: Keys, evaluating: bool) -> AnyArray:
        """The rows of these keys, shape (n, dim), as the job's wire has them.

        An unseen key is answered with its first value and not made.
        """
        return self._tables[table].pull(keys, evaluating)

    def span(self, group: int) -> AnyArray:
        """This place's span of a dense group; never changed afterwards."""
        return self._groups[group].values

    def bytes_needed(self, keys: Mapping[int, int]) -> int:
        """At most so many bytes does it take to apply gradients of that many keys of each table, beyond the gradients.

        That is rows, but for those that take the place of deleted ones, index and sums.
        """
        return sum(
            max(0, count - self._tables[table].free_rows) * self._row_bytes[table] + count * self._sum_bytes[table]
            for table, count in keys.items()
        )

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
