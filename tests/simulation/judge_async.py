"""What must hold at the end of a run under `Async`: which batches have been applied at each place."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evergrad.messages import Place
from evergrad.placement import span_owned
from evergrad.schedule import async_task, async_tasks

from .arithmetic import (
    Batch,
    batches_of,
    initial_values,
    is_poisoned,
    is_skipped,
    keys_of,
    place_of,
    refusing_place,
    samples,
)
from .faults import Kind
from .oracle import Call
from .plan import APPLIED, COUNTED, LARGE_BYTES, PASSING, Plan
from .whole import Whole, differing

if TYPE_CHECKING:
    from .world import World


def judge(world: "World") -> tuple[Callable[[Call], dict], dict[Call, np.ndarray]]:
    """Find what is wrong with a run; returns what was to be saved and found in evaluations."""
    for place in range(world.places):
        _Judge(world, Place(place)).judge()
    watch = world.watch
    return watch.expected_models.__getitem__, watch.expected_totals | _empty_totals(world.plan)


def _empty_totals(plan: Plan) -> dict[Call, np.ndarray]:
    """An evaluation of no samples is done before anything is handed out."""
    epochs = enumerate(plan.epochs)
    return {(e, n): np.zeros(0) for e, epoch in epochs for n, (count, _) in enumerate(epoch.evaluations) if not count}


def _groups(plan: Plan, epoch: int) -> Iterator[list[Batch]]:
    """The batches of an epoch that contribute something, as they are pushed."""
    e, first = plan.epochs[epoch], plan.first_batch(epoch)
    for index in range(async_tasks(e.samples, e.batch_size, plan.update.batches)):
        ids = samples(plan, epoch, *async_task(e.samples, e.batch_size, plan.update.batches, index))
        batches = batches_of(plan, Batch(epoch, first + index * plan.update.batches, ids))
        for begin in range(0, len(batches), plan.update.push_every):
            group = batches[begin : begin + plan.update.push_every]
            yield [batch for batch in group if not is_skipped(plan, batch)]


_NO_KEYS = np.zeros(0, np.int64)


class Update(NamedTuple):
    """What is applied at a place as one: some batches of a task."""

    batches: list[Batch]


class _Judge:
    """Judges one place. `must`: the updates applied there, `may`: those of which it is not known."""

    def __init__(self, world: "World", place: Place) -> None:
        self._world, self._plan, self._place = world, world.plan, place
        self._whole = Whole(world.pservers)
        self.must: list[Update] = []
        self.may: list[Update] = []
        for epoch in self._plan.visited():
            self._sort(epoch)

    def judge(self) -> None:
        """Every batch was applied once; those of an epoch that was left, once at most."""
        if self._plan.is_dense:
            self._judge_dense()
        for number, name in enumerate(self._plan.tables):
            found = {k: n for k, n in self._whole.counts(number).items() if self._is_here([k])[0]}
            if name == COUNTED:
                self._compare(name, found, self._counted(number, found))
            elif name == PASSING and not self.may:
                self._compare(name, found, self._passing(number))
            elif name == "rare" and not self.may and self._plan.update.push_every == 1:
                self._compare(name, found, self._rare(number))
            elif self._plan.kinds[number].spec.max_rows and len(found) > 1:
                self._fault(f"table {name} has {len(found)} rows in one slot")

    def _sort(self, epoch: int) -> None:
        """What happens here to the batches of an epoch.

        A group that a pserver refuses is pushed again without anything in it. Where that place refuses a part of it,
        the others may have had all parts or not.
        """
        plan, places, e = self._plan, self._world.places, self._plan.epochs[epoch]
        is_left = e.leave is not None and e.leave.batch < -(-e.samples // e.batch_size)
        for group in _groups(plan, epoch):
            bad = [batch for batch in group if is_poisoned(plan, batch)]
            if not group or self._place in [refusing_place(plan, batch, places) for batch in bad]:
                continue
            is_cut = bool(bad) and plan.message_bytes < LARGE_BYTES
            (self.may if is_left or is_cut else self.must).append(Update(group))

    def _judge_dense(self) -> None:
        initial = initial_values(self._plan)[APPLIED].values
        span = span_owned(initial.size, self._place, self._world.places)
        applied = self._world.pservers[self._place].model.span(APPLIED) - initial[span.start : span.stop]
        least = sum(len(update.batches) for update in self.must)
        most = least + sum(len(update.batches) for update in self.may)
        if len({*applied.tolist()}) > 1 or any(not least <= n <= most for n in applied.tolist()):
            self._fault(f"of {least} to {most} batches the elements of the dense parameters had {applied.tolist()}")

    def _counted(self, table: int, found: dict[int, float]) -> dict[int, float]:
        """Each sample once; of those of which it is not known what there is, if it is there once."""
        rows = {key: 1.0 for update in self.must for key in self._keys(table, update)}
        return rows | {key: 1.0 for update in self.may for key in self._keys(table, update) if key in found}

    def _passing(self, table: int) -> dict[int, float]:
        """The rows of a table whose rows are deleted by the batches of the next epoch."""
        rows: dict[int, float] = {}
        for update in self.must:
            for batch in update.batches:
                if batch.epoch:
                    for key in self._plan.kinds[table].keys(batch.epoch - 1, batch.ids).tolist():
                        rows.pop(key, None)
            rows |= dict.fromkeys(self._keys(table, update), 1.0)
        return rows

    def _rare(self, table: int) -> dict[int, float]:
        """A row counts from the update on in which its key is met often enough."""
        least = self._plan.kinds[table].spec.min_count
        met = Counter(key for update in self.must for key in self._keys(table, update))
        return {key: float(n - least + 1) for key, n in met.items() if n >= least}

    def _keys(self, table: int, update: Update) -> set[int]:
        keys = [key for b in update.batches for key in dict(keys_of(self._plan, b)).get(table, _NO_KEYS).tolist()]
        return {key for key, is_here in zip(keys, self._is_here(keys), strict=True) if is_here}

    def _is_here(self, keys: list[int]) -> list[bool]:
        return [place == self._place for place in place_of(np.array(keys, np.int64), self._world.places)]

    def _compare(self, name: str, found: dict[int, float], wanted: dict[int, float]) -> None:
        if found != wanted:
            self._fault(f"table {name}: {differing(found, wanted)}")

    def _fault(self, text: str) -> None:
        self._world.fault(Kind.COUNT, f"at place {self._place}: {text}")
