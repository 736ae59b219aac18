"""What one pserver answers to a pull, put together from its replies."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evergrad.errors import InvariantError
from evergrad.kernels.half import decoded
from evergrad.messages import AnyArray, Floats, GroupSpan, Pulled, TableKeys, Wire


class Wanted(NamedTuple):
    """What one request asks for."""

    tables: tuple[TableKeys, ...]
    spans: tuple[GroupSpan, ...]


class Collected:
    """Rows of tables and spans of groups of one pserver, from the answers to some requests in whatever order.

    What one answer has all of is not copied.
    """

    def __init__(self, wire: Wire, requests: Sequence[Wanted]) -> None:
        self._wire, self._requests = wire, requests
        self._rows: dict[int, Floats] = {}
        self._groups: dict[int, AnyArray] = {}
        self._counts: dict[int, int] = {}
        self._starts: list[list[int]] = []
        for tables, _ in requests:
            self._starts.append([self._counts.get(t.table, 0) for t in tables])
            self._counts.update((t.table, self._counts.get(t.table, 0) + t.keys.size) for t in tables)
        self._sizes = {span.group: span.stop for _, spans in requests for span in spans}

    def take(self, number: int, answer: Pulled) -> None:
        """The answer to a request.

        Raises:
            InvariantError: it has more or less than was asked for.
        """
        (tables, spans), starts = self._requests[number], self._starts[number]
        wanted = [t.keys.size for t in tables] + [s.stop - s.start for s in spans]
        if [part.shape[0] for part in (*answer.rows, *answer.groups)] != wanted:
            raise InvariantError("a pserver answered a pull with more or less than it was asked for")
        for asked, start, rows in zip(tables, starts, answer.rows, strict=True):
            _put(self._rows, asked.table, self._counts[asked.table], start, decoded(rows, self._wire))
        for span, values in zip(spans, answer.groups, strict=True):
            _put(self._groups, span.group, self._sizes[span.group], span.start, values)

    def rows(self, table: int) -> Floats:
        """The rows of a table, in the order of the keys asked."""
        return self._rows[table]

    def group(self, group: int) -> AnyArray:
        """This pserver's span of a group."""
        return self._groups[group]


def _put(into: dict[int, AnyArray], item: int, size: int, start: int, part: AnyArray) -> None:
    """Put a part of an item, which has `size` units, where it belongs."""
    if part.shape[0] == size:
        into[item] = part
        return
    if item not in into:
        into[item] = np.empty((size, *part.shape[1:]), part.dtype)
    into[item][start : start + part.shape[0]] = part


def joined(parts: Sequence[AnyArray]) -> AnyArray:
    """Arrays one after the other, without a copy if there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
