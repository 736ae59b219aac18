"""Which pushes a pserver takes: all that arrives is checked here, once, before anything is changed."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from evergrad.kernels.half import as_seen
from evergrad.kernels.hashing import are_owned
from evergrad.kernels.lanes import Wired
from evergrad.kernels.merge import all_finite
from evergrad.messages import (
    INIT_STEP,
    GroupGrads,
    GroupKind,
    GroupSpan,
    GroupSpec,
    Keys,
    Schema,
    TableGrads,
    TableKeys,
    Wire,
)
from evergrad.placement import slots_owned, span_owned

MAX_PARTS = 4096
"""Into so many parts a push may be cut."""


class Admission:
    """Checks keys and pushes against the model and this pserver's part of it."""

    def __init__(self, schema: Schema, place: int, places: int) -> None:
        self._schema = schema
        self._slots = slots_owned(place, places)
        self._spans = [span_owned(group.size, place, places) for group in schema.groups]

    def refuse_table(self, table: int) -> str | None:
        """Why there is no such table; None if there is."""
        tables = len(self._schema.tables)
        return None if 0 <= table < tables else f"table number {table} is unknown; the model has {tables}"

    def refuse_part(self, part: int, parts: int) -> str | None:
        """Why there is no such part of a push; None if there is."""
        is_one = 0 <= part < parts <= MAX_PARTS
        return None if is_one else f"part {part} of {parts}; a push has 1 to {MAX_PARTS} parts"

    def refuse_evictions(self, evict: Sequence[TableKeys]) -> str | None:
        """Why these rows cannot be named for eviction; None if they can. They may be other pservers'."""
        for named in evict:
            if reason := self.refuse_table(named.table):
                return reason
            if named.keys.ndim != 1:
                return f"keys to evict of shape {named.keys.shape}; send one dimension"
        return None

    def refuse_whole(self, step: int, groups: Sequence[GroupGrads]) -> str | None:
        """Why all parts of a push together do not make whole spans, at first of all groups; None if they do."""
        if step == INIT_STEP and len(groups) < len(self._schema.groups):
            return "the initial values must be those of every dense group"
        for push in groups:
            if push.values.size != len(self._spans[push.group]):
                return f"dense group {push.group}: {push.values.size} of {len(self._spans[push.group])} elements"
        return None

    def refuse_span(self, wanted: GroupSpan) -> str | None:
        """Why these elements cannot be read here; None if they can."""
        if reason := self.refuse_group(wanted.group):
            return reason
        size = len(self._spans[wanted.group])
        if not 0 <= wanted.start <= wanted.stop <= size:
            return f"dense group {wanted.group}: elements {wanted.start} to {wanted.stop} of a span of {size}"
        return None

    def refuse_export(self, table: int, slot: int) -> str | None:
        """Why this table cannot be read from this slot on; None if it can."""
        if reason := self.refuse_table(table):
            return reason
        is_owned = slot in self._slots or slot == self._slots.start
        return None if is_owned else f"slot {slot} is another pserver's"

    def refuse_group(self, group: int) -> str | None:
        """Why there is no such dense group; None if there is."""
        groups = len(self._schema.groups)
        return None if 0 <= group < groups else f"dense group number {group} is unknown; the model has {groups}"

    def refuse_keys(self, table: int, keys: Keys) -> str | None:
        """Why these keys cannot be read from this table here; None if they can."""
        if reason := self.refuse_table(table):
            return reason
        name = self._schema.tables[table].name
        if keys.ndim != 1:
            return f"table {name!r}: keys of shape {keys.shape}; send one dimension"
        if not are_owned(keys, self._slots.start, self._slots.stop):
            return f"table {name!r}: keys of another pserver"
        return None

    def refuse_push(
        self, step: int, samples: int, tables: tuple[TableGrads, ...], groups: tuple[GroupGrads, ...]
    ) -> str | None:
        """Why this push cannot be applied; None if it can."""
        if samples < 1:
            return f"a push of {samples} samples; it must have one or more"
        if len({t.table for t in tables}) < len(tables) or len({g.group for g in groups}) < len(groups):
            return "a table or group is named twice"
        if step == INIT_STEP and tables:
            return "the initial values must be those of dense groups"
        reasons = [self._refuse_rows(t) for t in tables] + [self._refuse_span(g, step) for g in groups]
        return next((reason for reason in reasons if reason), None)

    def _refuse_rows(self, push: TableGrads) -> str | None:
        if reason := self.refuse_keys(push.table, push.keys):
            return reason
        spec = self._schema.tables[push.table]
        where = f"table {spec.name!r}"
        wire = self._schema.wire
        if push.grads.dtype != (np.float32 if wire is Wire.FLOAT32 else np.uint16):
            return f"{where}: gradients of {push.grads.dtype}; send {wire}"
        if push.grads.shape != (push.keys.size, spec.dim):
            return f"{where}: gradients of shape {push.grads.shape} for {push.keys.size} keys of dim {spec.dim}"
        return _refuse_numbers(where, push.lr, as_seen(push.grads, wire))

    def _refuse_span(self, push: GroupGrads, step: int) -> str | None:
        if reason := self.refuse_group(push.group):
            return reason
        spec, size = self._schema.groups[push.group], len(self._spans[push.group])
        where, dtype = f"dense group {push.group} ({spec.kind})", dense_dtype(spec)
        if push.values.dtype != dtype or push.values.ndim != 1 or not 0 <= push.start <= size - push.values.size:
            shape = f"{push.values.dtype} of shape {push.values.shape} from {push.start} on"
            return f"{where}: {shape}; send {dtype} inside a span of {size}"
        if push.present.shape != (len(spec.parameters),):
            return f"{where}: flags of shape {push.present.shape} for {len(spec.parameters)} parameters"
        if step == INIT_STEP:
            return None
        if spec.kind is GroupKind.FROZEN:
            return f"{where}: frozen parameters have no gradients"
        return None if spec.kind is GroupKind.LOWEST else _refuse_numbers(where, push.lr, push.values)


def dense_dtype(spec: GroupSpec) -> "np.dtype[Any]":
    """The type of a group's values."""
    return np.dtype(np.int64 if spec.kind is GroupKind.LOWEST else np.float32)


def _refuse_numbers(where: str, lr: float, values: Wired) -> str | None:
    if not isfinite(lr) or lr < 0:
        return f"{where}: learning rate {lr}; it must be finite and not negative"
    if not all_finite(values.reshape(-1)):
        return f"{where}: NaN or infinity among the values"
    return None
