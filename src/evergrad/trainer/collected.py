"""What one pserver answers to a pull, put together from its replies."""

from collections.abc import Sequence

import numpy as np

from evergrad.kernels.half import decoded
from evergrad.messages import AnyArray, Floats, GroupSpan, Pulled, TableKeys, Wire


class Collected:
    """Rows of tables and spans of groups of one pserver, piece after piece."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._rows: dict[int, list[Floats]] = {}
        self._groups: dict[int, list[AnyArray]] = {}

    def take(self, tables: Sequence[TableKeys], spans: Sequence[GroupSpan], answer: Pulled) -> None:
        """The answer to a request for these."""
        for asked, rows in zip(tables, answer.rows, strict=True):
            self._rows.setdefault(asked.table, []).append(decoded(rows, self._wire))
        for span, values in zip(spans, answer.groups, strict=True):
            self._groups.setdefault(span.group, []).append(values)

    def rows(self, table: int) -> Floats:
        """The rows of a table, in the order of the keys asked."""
        return joined(self._rows[table])

    def group(self, group: int) -> AnyArray:
        """This pserver's span of a group."""
        return joined(self._groups[group])


def joined(parts: Sequence[AnyArray]) -> AnyArray:
    """Arrays one after the other, without a copy if there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
