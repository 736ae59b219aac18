"""What a trainer holds during a task of `LocalSGD`: its own copy of what it trains, and what its steps made of it.

Numbers only; `bound.py` puts them into the torch model. Rules are applied by the pservers' own code, so that a step
taken here has the bits of one taken there.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels import gather, index
from evergrad.messages import AnyArray, Flags, Floats, GroupKind, GroupSpec, Keys, TableKeys
from evergrad.optim import RuleSpec
from evergrad.placement import SLOTS
from evergrad.pserver.dense import DenseGroup
from evergrad.pserver.rules import apply_rows
from evergrad.trainer.trainer import RowGrads, SpanGrads

Array = TypeVar("Array", bound=NDArray[Any])

ONE_SAMPLE = 1
"""A step of a trainer's own has one contribution, whatever it weighs: the mean over it is itself."""
_FIRST_ENTRIES = 1 << 11


class TaskRows:
    """The rows of one table that a task has met: their values when pulled, and now.

    Invariants:
        1. Row i is `[value | state]` at `i * width` of the arena; its key is `_keys[i]`.
        2. `_is_here[i]`: the value was pulled in this task; `_base[i]` is what it was then.
        3. `_is_changed[i]`: a step of this task has met it. No other differs from its base.

    Cost: (2 + state) * dim * 4 bytes a row and 40 to 80 more, twice while it grows; 0.4 MB for the index of a table.
    """

    def __init__(self, dim: int, rule: RuleSpec) -> None:
        self.updates = 0
        """Steps that met this table in this task."""
        self._dim, self._rule, self._width = dim, rule, rule.row_width(dim)
        self._all_updates = 0
        self._index = index.empty_index(range(SLOTS))
        self._arena: Floats = np.empty(0, np.float32)
        self._base: Floats = np.empty((0, dim), np.float32)
        self._keys: Keys = np.empty(0, np.int64)
        self._is_here = self._is_changed = np.empty(0, np.bool_)

    def forget_values(self) -> None:
        """The task is over: values are to be pulled anew, the state of rows stays."""
        self.updates = 0
        self._is_here[:] = self._is_changed[:] = False

    def missing(self, keys: Keys) -> Keys:
        """Those of different keys whose rows are not here."""
        rows = index.find(self._index, keys)
        known = np.flatnonzero(rows >= 0)
        is_missing = np.ones(keys.size, np.bool_)
        is_missing[known] = ~self._is_here[rows[known]]
        return keys[is_missing]

    def take(self, keys: Keys, values: Floats) -> None:
        """The pulled rows, shape (n, dim), of different keys whose rows were missing."""
        rows, new = self._made(keys)
        arena = self._arena.reshape(-1, self._width)
        arena[rows[new], self._dim :] = self._rule.initial_state
        arena[rows, : self._dim] = self._base[rows] = values
        self._keys[rows] = keys
        self._is_here[rows] = True

    def values(self, keys: Keys) -> Floats:
        """What the rows of these keys, which are here, are now: shape (n, dim)."""
        values = np.empty((keys.size, self._dim), np.float32)
        gather.copy_rows(self._arena, self._width, index.find(self._index, keys), values)
        return values

    def step(self, keys: Keys, grads: Floats, lr: float) -> None:
        """Apply the rule once to the rows of different keys, which are here."""
        rows = index.find(self._index, keys)
        self.updates += 1
        self._all_updates += 1
        apply_rows(self._rule, self._arena, rows, grads, lr, self._all_updates)
        self._is_changed[rows] = True

    def difference(self) -> tuple[Keys, Floats]:
        """The keys that steps have met, in the order in which they came, and base - value of each."""
        rows = np.flatnonzero(self._is_changed)
        return self._keys[rows], self._base[rows] - self._arena.reshape(-1, self._width)[rows, : self._dim]

    def _made(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of the rows of these keys, and which of them are new; there is room for all."""
        rows, new = np.empty(keys.size, np.int64), np.empty(keys.size, np.int64)
        done = made = 0
        while True:
            done, made = index.find_or_make(self._index, keys, done, made, rows, new)
            if done == keys.size:
                break
            entries = _longer(self._index.entries, max(_FIRST_ENTRIES, self._index.entries.size + 1))
            free_class = _longer(self._index.free_class, entries.size // (2 * index.UNIT))
            self._index = self._index._replace(entries=entries, free_class=free_class)
        count = int(self._index.pool[index.ROWS])
        self._keys, self._base = _longer(self._keys, count), _longer(self._base, count)
        self._is_here, self._is_changed = _longer(self._is_here, count), _longer(self._is_changed, count)
        self._arena = _longer(self._arena.reshape(-1, self._width), count).reshape(-1)
        return rows, new[:made]


class LocalModel:
    """A trainer's own copy of the tables and dense groups for the length of a task.

    Args:
        tables: dim and inner rule of each.
        groups: the dense groups; those trained with their inner rule.
        keeps_state: whether optimizer state outlives a task.
    """

    def __init__(self, tables: Sequence[tuple[int, RuleSpec]], groups: Sequence[GroupSpec], keeps_state: bool) -> None:
        self.samples = 0
        """Of the batches whose steps were taken in this task."""
        self.evict: list[TableKeys] = []
        """What these batches want evicted."""
        self._table_specs, self._group_specs, self._keeps_state = tuple(tables), tuple(groups), keeps_state
        self._tables: list[TaskRows] = []
        self._groups: dict[int, DenseGroup] = {}  # but those that nothing changes
        self._base: list[AnyArray] = []
        self._present: list[Flags] = []
        self._make()

    @property
    def has_values(self) -> bool:
        """Whether the dense values of this task are here."""
        return len(self._base) == len(self._group_specs)

    def forget(self) -> None:
        """A task is over, or given up: nothing is left of it but, where it is kept, the optimizer's state."""
        self.samples, self.evict, self._base = 0, [], []
        if not self._keeps_state:
            self._make()
        for table in self._tables:
            table.forget_values()

    def take_dense(self, values: Sequence[AnyArray]) -> None:
        """The pulled values of every dense group; they stay the caller's and must not change."""
        self._base = list(values)
        self._present = [np.zeros(len(spec.parameters), np.uint8) for spec in self._group_specs]
        for number, group in self._groups.items():
            group.set(values[number])

    def dense(self, group: int) -> AnyArray:
        """What a group is now; the array is never changed."""
        return self._groups[group].values if group in self._groups else self._base[group]

    def missing(self, wanted: Sequence[tuple[int, Keys]]) -> list[tuple[int, Keys]]:
        """Of different keys by table those whose rows are not here."""
        found = ((table, self._tables[table].missing(keys)) for table, keys in wanted)
        return [(table, keys) for table, keys in found if keys.size]

    def take_rows(self, table: int, keys: Keys, values: Floats) -> None:
        """The pulled rows of different keys."""
        self._tables[table].take(keys, values)

    def rows(self, table: int, keys: Keys) -> Floats:
        """What the rows of these keys, which are here, are now: shape (n, dim)."""
        return self._tables[table].values(keys)

    def step(self, rows: Sequence[RowGrads], spans: Sequence[SpanGrads], samples: int) -> None:
        """Take one step with the gradients of a batch of so many samples, and take its buffers."""
        for r in rows:
            self._tables[r.table].step(r.keys, r.grads, r.lr)
        for s in spans:
            self._groups[s.group].update([(s.values, s.present, ONE_SAMPLE)], ONE_SAMPLE, s.lr)
            self._present[s.group] |= s.present
        self.samples += samples

    def difference(self, lr: float) -> tuple[list[RowGrads], list[SpanGrads]]:
        """What the task contributes: base - value of what was trained, and new values of buffers.

        Args:
            lr: the outer learning rate.
        """
        tables = [(number, table) for number, table in enumerate(self._tables) if table.updates]
        rows = [RowGrads(number, lr, *table.difference()) for number, table in tables]
        spans = []
        for number, present in enumerate(self._present):
            if present.any():
                is_trained = self._group_specs[number].kind is GroupKind.TRAINED
                changed = self._changed(number, is_trained)
                spans.append(SpanGrads(number, lr if is_trained else 0.0, changed, present))
        return rows, spans

    def _changed(self, number: int, is_trained: bool) -> AnyArray:
        """A group's differences, or new values if it is of buffers; zeros where nothing has changed."""
        base, now = self._base[number], self.dense(number)
        changed = np.zeros_like(now)
        for start, stop in _present_spans(self._group_specs[number], self._present[number]):
            changed[start:stop] = base[start:stop] - now[start:stop] if is_trained else now[start:stop]
        return changed

    def _make(self) -> None:
        self._tables = [TaskRows(dim, rule) for dim, rule in self._table_specs]
        changing = {i: spec for i, spec in enumerate(self._group_specs) if spec.kind is not GroupKind.FROZEN}
        self._groups = {i: DenseGroup(spec, range(spec.size)) for i, spec in changing.items()}


def _present_spans(spec: GroupSpec, present: Flags) -> Iterator[tuple[int, int]]:
    start = 0
    for parameter, has in zip(spec.parameters, present, strict=True):
        if has:
            yield start, start + parameter.size
        start += parameter.size


def _longer(array: Array, count: int) -> Array:
    """The array with room for so many; what it held is kept, what is new is zero."""
    if count <= array.shape[0]:
        return array
    longer = np.zeros((max(count, 2 * array.shape[0]), *array.shape[1:]), array.dtype)
    longer[: array.shape[0]] = array
    return longer  # type: ignore[return-value]  # of the type of `array`
