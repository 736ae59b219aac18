"""Pushes that come in several messages, put together when all are here."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from evergrad.messages import GroupGrads, Push, PushBatch, TableGrads

P = TypeVar("P", Push, PushBatch)


class Parts:
    """Parts of pushes not complete yet, by what the push is known by.

    Cost: what has come, until the step's commit or the batch is applied; joining a push takes it twice for a moment.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, dict[int, Any]] = {}

    def add(self, key: Hashable, push: P) -> P | None:
        """Take a part; returns the whole push if it is the last one missing."""
        if push.parts == 1:
            return push
        parts = self._open.setdefault(key, {})
        parts[push.part] = push
        if len(parts) < push.parts:
            return None
        del self._open[key]
        whole: P = _joined([parts[i] for i in sorted(parts)])
        return whole

    def has(self, key: Hashable, part: int) -> bool:
        """Whether this part is here already, of a push that is not complete yet."""
        return part in self._open.get(key, ())

    def forget(self, is_passed: Callable[[Any], bool]) -> None:
        """The pushes known by keys of which this is true are not wanted any more."""
        self._open = {key: parts for key, parts in self._open.items() if not is_passed(key)}

    def clear(self) -> None:
        """Nothing that has come is wanted any more."""
        self._open = {}


def _joined(parts: Sequence[P]) -> P:
    """One push of all their rows and spans, in the order of the parts."""
    rows: dict[int, list[TableGrads]] = {}
    spans: dict[int, list[GroupGrads]] = {}
    for part in parts:
        for t in part.tables:
            rows.setdefault(t.table, []).append(t)
        for g in part.groups:
            spans.setdefault(g.group, []).append(g)
    tables = tuple(
        TableGrads(table, r[0].lr, np.concatenate([t.keys for t in r]), np.concatenate([t.grads for t in r]))
        for table, r in rows.items()
    )
    groups = tuple(
        GroupGrads(group, s[0].lr, np.concatenate([g.values for g in s]), s[0].present)
        for group, s in ((group, sorted(s, key=lambda g: g.start)) for group, s in spans.items())
    )
    return msgspec.structs.replace(parts[0], part=0, parts=1, tables=tables, groups=groups)
