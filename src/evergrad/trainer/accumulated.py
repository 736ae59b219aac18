"""What several batches contribute together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evergrad.kernels.half import encoded
from evergrad.kernels.merge import add_flat, divide, mean_rows
from evergrad.messages import AnyArray, Flags, Floats, GroupKind, GroupSpec, Keys, Numbers, Schema, TableKeys
from evergrad.trainer.trainer import RowGrads, SpanGrads


class Contribution(NamedTuple):
    """What is pushed as one."""

    rows: Sequence[RowGrads] = ()
    spans: Sequence[SpanGrads] = ()
    evict: Sequence[TableKeys] = ()


class _Rows(NamedTuple):
    lr: float
    parts: list[tuple[Keys, Floats, int]]


class _Sum(NamedTuple):
    lr: float
    values: Numbers
    present: Flags


class Accumulated:
    """The contributions of several batches, as one.

    Gradients become their mean over the samples of all these batches, each summed in the order of batches in float64
    and rounded once: what a step of `Sync` makes of its tasks. Of a table or group the learning rate of the first batch
    that names it counts. Buffers are those of the last batch that changed them.

    Cost: the rows' gradients of all batches; 8 bytes for each element of the dense groups.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._only: tuple[Sequence[RowGrads], Sequence[SpanGrads], int] | None = ((), (), 0)
        self._samples = 0
        self._rows: dict[int, _Rows] = {}
        self._sums: dict[int, _Sum] = {}
        self._buffers: dict[int, SpanGrads] = {}
        self._evict: list[TableKeys] = []

    def add(
        self, rows: Sequence[RowGrads], spans: Sequence[SpanGrads], samples: int, evict: Sequence[TableKeys]
    ) -> None:
        """A batch of so many samples contributes these.

        Gradients of rows are float32; those of a batch that stays the only one may be as the job's wire has them.
        """
        self._evict += evict
        if self._samples == 0:
            self._only = rows, spans, samples
        else:
            if self._only is not None:
                self._sum(*self._only)
                self._only = None
            self._sum(rows, spans, samples)
        self._samples += samples

    def together(self) -> Contribution:
        """What they contribute; rows as the job's wire has them."""
        if self._only is not None:
            rows, spans, _ = self._only
            return Contribution([r._replace(grads=self._wired(r.grads)) for r in rows], spans, self._evict)
        return Contribution(
            [self._mean_of_rows(table, of_table) for table, of_table in self._rows.items()],
            [*(self._mean_of_group(group, total) for group, total in self._sums.items()), *self._buffers.values()],
            self._evict,
        )

    def _sum(self, rows: Sequence[RowGrads], spans: Sequence[SpanGrads], samples: int) -> None:
        for r in rows:
            self._rows.setdefault(r.table, _Rows(r.lr, [])).parts.append((r.keys, r.grads, samples))
        for s in spans:
            if self._schema.groups[s.group].kind is GroupKind.TRAINED:
                self._add_gradients(s, samples)
            else:
                before = self._buffers.get(s.group)
                self._buffers[s.group] = s if before is None else _newer(self._schema.groups[s.group], before, s)

    def _add_gradients(self, span: SpanGrads, samples: int) -> None:
        if span.group not in self._sums:
            self._sums[span.group] = _Sum(span.lr, np.zeros(span.values.size), np.zeros_like(span.present))
        total = self._sums[span.group]
        add_flat(total.values, span.values, samples)
        np.bitwise_or(total.present, span.present, out=total.present)

    def _mean_of_rows(self, table: int, rows: _Rows) -> RowGrads:
        keys, means = mean_rows(rows.parts, self._samples, self._schema.tables[table].dim)
        return RowGrads(table, rows.lr, keys, self._wired(means))

    def _wired(self, grads: AnyArray) -> AnyArray:
        return grads if grads.dtype == np.uint16 else encoded(grads, self._schema.wire)

    def _mean_of_group(self, group: int, total: _Sum) -> SpanGrads:
        means = np.empty(total.values.size, np.float32)
        divide(total.values, self._samples, means)
        return SpanGrads(group, total.lr, means, total.present)


def _newer(spec: GroupSpec, before: SpanGrads, after: SpanGrads) -> SpanGrads:
    """Buffers as a later batch has left them, and otherwise as an earlier one has."""
    is_after = np.repeat(after.present.astype(np.bool_), [p.size for p in spec.parameters])
    values = np.where(is_after, after.values, before.values)
    return SpanGrads(after.group, after.lr, values, before.present | after.present)
