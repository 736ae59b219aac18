"""What a batch computes: element-wise float32 arithmetic in place of torch.

All of it is a pure function of the plan, the batch and what was pulled, so that any two runs that keep the promises
end with the same bits, and so that what they must end with can be computed without a job.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from evergrad.data.order import epoch_order
from evergrad.kernels.half import encoded
from evergrad.kernels.hashing import slots_of
from evergrad.messages import GroupKind, Keys, TableKeys, TaskBatches
from evergrad.placement import slots_owned, span_owned
from evergrad.trainer.trainer import RowGrads, SpanGrads

from .plan import APPLIED, AVERAGED, BUFFERS, FROZEN, LOWEST, PASSING, SEED, TRAINED, Plan


class Batch(NamedTuple):
    """Some samples of an epoch; `number` is what learning rates depend on."""

    epoch: int
    number: int
    ids: np.ndarray


class Group(NamedTuple):
    """How many samples and batches contribute together with a batch; 0 samples: nobody else does."""

    samples: int
    batches: int


ALONE = Group(0, 1)


class Gradients(NamedTuple):
    """What a batch contributes."""

    rows: list[RowGrads]
    spans: list[SpanGrads]
    evict: list[TableKeys]


def samples(plan: Plan, epoch: int, start: int, stop: int) -> np.ndarray:
    """The samples at these positions of an epoch's order."""
    return _samples(plan.epochs[epoch].samples, epoch, start, stop)


@lru_cache(maxsize=10_000)
def _samples(count: int, epoch: int, start: int, stop: int) -> np.ndarray:
    ids = epoch_order(count, SEED, epoch, np.arange(start, stop))
    ids.setflags(write=False)
    return ids


def initial_values(plan: Plan, frozen: float = 0.0) -> list[SpanGrads]:
    """The dense values a script starts with; `frozen` is added to the frozen ones."""
    spans = []
    for number, group in enumerate(plan.schema.groups):
        dtype = np.int64 if group.kind is GroupKind.LOWEST else np.float32
        values = np.arange(1, group.size + 1) + (frozen if group.kind is GroupKind.FROZEN else 0)
        spans.append(SpanGrads(number, 0.0, values.astype(dtype), _flags(len(group.parameters))))
    return spans


def group_of(plan: Plan, batches: Sequence[Batch]) -> Group:
    """How many of some batches contribute together."""
    counted = [batch for batch in batches if not is_skipped(plan, batch)]
    return Group(sum(batch.ids.size for batch in counted), max(1, len(counted)))


def is_skipped(plan: Plan, batch: Batch) -> bool:
    """Whether the script passes a batch over."""
    return plan.skips and (int(batch.ids[0]) * 31 + batch.epoch * 17) % 5 < 2


def is_poisoned(plan: Plan, batch: Batch) -> bool:
    """Whether a batch has a gradient that a pserver refuses."""
    return plan.poison and (int(batch.ids[-1]) * 13 + batch.epoch) % 6 == 1


def raises(plan: Plan, task: Batch) -> bool:
    """Whether the script raises in one of the batches of a task."""
    where = plan.raises
    if where is None or where.epoch != task.epoch:
        return False
    return any(where.sample in batch.ids and not is_skipped(plan, batch) for batch in batches_of(plan, task))


def contributes(plan: Plan, task: Batch, is_left: bool = False) -> bool:
    """Whether a task counts in its step; one that is left after its first batch does so for that alone."""
    batches = batches_of(plan, task)[: 1 if is_left else None]
    if is_poisoned(plan, task) or raises(plan, task):
        return False
    return any(not is_skipped(plan, batch) for batch in batches)


def batches_of(plan: Plan, task: Batch) -> list[Batch]:
    """The batches of a task, of which the first is numbered as the task."""
    size = plan.epochs[task.epoch].batch_size
    starts = range(0, task.ids.size, size)
    return [task._replace(number=task.number + i, ids=task.ids[s : s + size]) for i, s in enumerate(starts)]


def batches_at(plan: Plan, epoch: int, of: TaskBatches) -> list[Batch]:
    """The batches of a task of `Async`."""
    return batches_of(plan, Batch(epoch, of.first, samples(plan, epoch, of.start, of.stop)))


def refusing_place(plan: Plan, batch: Batch, places: int) -> int:
    """The place that holds the element whose gradient is refused."""
    if plan.is_dense:
        return next(p for p in range(places) if _poisoned_element(batch) in span_owned(6, p, places))
    return place_of(keys_of(plan, batch)[0][1][:1], places)[0]


def place_of(keys: Keys, places: int) -> list[int]:
    """Which place owns each key."""
    return [next(p for p in range(places) if slot in slots_owned(p, places)) for slot in slots_of(keys).tolist()]


def keys_of(plan: Plan, batch: Batch) -> list[tuple[int, Keys]]:
    """The different keys a batch has in each table. Some batches have nothing to do with the last table."""
    tables = list(enumerate(plan.kinds))
    if len(tables) > 1 and batch.ids[0] % 4 == 3:
        del tables[-1]
    return [(number, np.unique(kind.keys(batch.epoch, batch.ids))) for number, kind in tables]


def gradients(
    plan: Plan, batch: Batch, rows: Sequence[np.ndarray], groups: Sequence[np.ndarray], of: Group = ALONE
) -> Gradients:
    """What a batch contributes, given the rows of `keys_of` and all dense groups; gradients are float32.

    What counts does so once for each sample and each batch also where a group of batches contributes its mean.
    """
    rate = 0.1 / (1 + batch.number % 3)
    of_tables = []
    for (number, keys), values in zip(keys_of(plan, batch), rows, strict=True):
        kind = plan.kinds[number]
        if kind.counts:
            share = of.samples / batch.ids.size if of.samples else 1.0
            grads, lr = np.full((keys.size, kind.spec.dim), -share, np.float32), 1.0
        else:
            sums = np.zeros(keys.size, np.float32)
            np.add.at(sums, np.searchsorted(keys, kind.keys(batch.epoch, batch.ids)), (batch.ids % 5).astype("f4"))
            grads, lr = values * np.float32(0.25) + sums[:, None], rate
        of_tables.append(RowGrads(number, lr, keys, grads))
    spans = _spans(batch, rate, groups, of) if plan.is_dense else []
    found = Gradients(of_tables, spans, _evictions(plan, batch))
    return poisoned(batch, found) if is_poisoned(plan, batch) and not plan.is_local else found


def poisoned(batch: Batch, found: Gradients) -> Gradients:
    """The same with a gradient that the pserver which it is for refuses."""
    spans = [
        s._replace(values=_spoilt(s.values, _poisoned_element(batch))) if s.group == APPLIED else s for s in found.spans
    ]
    rows = list(found.rows)
    if not spans:
        rows[0] = rows[0]._replace(grads=_spoilt(rows[0].grads, 0))
    return Gradients(rows, spans, found.evict)


def wired(plan: Plan, found: Gradients) -> Gradients:
    """The same with rows as they are on the wire."""
    return found._replace(rows=[r._replace(grads=encoded(r.grads, plan.wire)) for r in found.rows])


def evaluated(rows: Sequence[np.ndarray], groups: Sequence[np.ndarray]) -> np.ndarray:
    """What an evaluation finds in a batch; the order in which such numbers are added up shows in their last bits."""
    dense = float(groups[TRAINED].sum()) if len(groups) else 0.5
    return np.array([sum(float(r.astype("f8").sum()) for r in rows) / 3 + dense * 0.1, dense])


def evaluated_keys(plan: Plan, epoch: int, start: int, stop: int) -> list[tuple[int, Keys]]:
    """The keys that an evaluation meets; some have no row."""
    ids = np.arange(start, stop)
    return [(number, np.unique(kind.keys(epoch, ids))) for number, kind in enumerate(plan.kinds)]


def _spans(batch: Batch, rate: float, groups: Sequence[np.ndarray], of: Group) -> list[SpanGrads]:
    shift = np.float32(int(batch.ids.sum()) % 7)
    present = np.array([1, batch.ids[0] % 2], np.uint8)  # a parameter that some batches do not use
    spans = [
        SpanGrads(TRAINED, rate, groups[TRAINED] * np.float32(0.5) + shift, present),
        SpanGrads(APPLIED, 1.0, np.full(groups[APPLIED].size, -of.batches, np.float32), _flags(1)),
        SpanGrads(AVERAGED, 0.0, groups[AVERAGED] * np.float32(0.75) + shift + groups[FROZEN], _flags(1)),
        SpanGrads(LOWEST, 0.0, groups[LOWEST] * 3 + batch.ids[0], _flags(1)),
    ]
    has_buffers = batch.ids[0] % 3 != 2  # a batch in which no buffer changes names none
    return [span for span in spans if has_buffers or span.group not in BUFFERS]


def _poisoned_element(batch: Batch) -> int:
    return int(batch.ids[0]) % 6


def _spoilt(values: np.ndarray, position: int) -> np.ndarray:
    values = values.copy()
    values[position] = np.nan
    return values


def _evictions(plan: Plan, batch: Batch) -> list[TableKeys]:
    """A batch has the rows deleted that its samples had in the epoch before."""
    if PASSING not in plan.tables or batch.epoch == 0:
        return []
    number = plan.tables.index(PASSING)
    return [TableKeys(number, plan.kinds[number].keys(batch.epoch - 1, batch.ids))]


def _flags(count: int) -> np.ndarray:
    return np.ones(count, np.uint8)
