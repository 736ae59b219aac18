"""What a simulated trainer's script does: `job/job.py` in small, with arithmetic in place of torch."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np

from evergrad.errors import CheckpointError
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    AsyncTask,
    BreakDone,
    DataSpec,
    EvalDone,
    EvalTask,
    ExportPart,
    InitTask,
    Over,
    SaveDone,
    SaveTask,
    SyncTask,
    TotalsAre,
    TrainDone,
    WantBatch,
    WantEnd,
    WantEpoch,
    WantSaved,
    WantTotals,
)
from evergrad.metrics import partial
from evergrad.placement import slots_owned
from evergrad.schedule import stream
from evergrad.trainer.exchange import Flow
from evergrad.trainer.trainer import PushRefused, Trainer, Void

from .arithmetic import (
    Batch,
    evaluated,
    evaluated_keys,
    gradients,
    initial_values,
    is_skipped,
    keys_of,
    samples,
)
from .oracle import PARTS, Call
from .plan import Plan


class Notes(Protocol):
    """What is told of what scripts have seen and done."""

    def saved_model(self, call: Call, model: dict) -> None:
        """A model was put where it belongs."""

    def totals(self, call: Call, totals: np.ndarray) -> None:
        """An evaluation has this result."""


class _Left(Exception):
    """The script leaves its loop over batches."""


class Script:
    """One trainer's script.

    Args:
        plan: what is trained.
        trainer: the real conversation with the job.
        compute: a flow that takes as long as computing a batch does.
        notes: told of what the script has seen.
        number: of this trainer; no two are alike.
    """

    def __init__(
        self, plan: Plan, trainer: Trainer, compute: Callable[[], Flow[None]], notes: Notes, number: int
    ) -> None:
        self.plan, self.trainer = plan, trainer
        self._initial = initial_values(plan, float(number) if plan.differ_at_first else 0.0)
        self._compute, self._notes = compute, notes
        self._done = None
        self._place = -1

    def run(self) -> Flow[None]:
        plan = self.plan
        yield from self.trainer.join()
        yield from self.trainer.agree(plan.schema)
        first = 0
        for count in plan.loops:
            yield from self._epochs(first, first + count)
            first += count
        yield from self._saves(plan.last_saves)
        while True:
            yield from self._ask(WantEnd())

    def _ask(self, want):
        while True:
            done, self._done = self._done, None
            answer = yield from self.trainer.ask(want, done)
            if not isinstance(answer, InitTask):
                return answer
            yield from self._compute()
            try:
                yield from self.trainer.push(answer, INIT_STEP, 0, 1, [], self._initial)
            except Void:
                continue
            self._done = TrainDone(answer.generation, answer.attempt, True, {})

    def _epochs(self, first, until):
        epoch = first - 1
        while (answer := (yield from self._ask(WantEpoch(epoch, until)))).epoch is not None:
            epoch = self._place = answer.epoch
            yield from self._batches(epoch)
            if epoch == self.plan.leaves_epochs:
                last = self._done.last if isinstance(self._done, BreakDone) else None
                self._done = BreakDone(epoch, until, last)
                break
            for ordinal, (count, size) in enumerate(self.plan.epochs[epoch].evaluations):
                yield from self._evaluate(epoch, ordinal, DataSpec(count, "valid", size))
            yield from self._saves(self.plan.epochs[epoch].saves)
        self._place = until

    # -- training ------------------------------------------------------------------------------------------------------

    def _batches(self, epoch):
        while True:
            task = yield from self._ask(WantBatch(epoch, self.plan.epochs[epoch].data))
            if isinstance(task, Over):
                return
            try:
                yield from self._sync_task(task) if isinstance(task, SyncTask) else self._async_task(task)
            except Void:
                continue
            except _Left:
                self._done = BreakDone(epoch, 0, self._done)
                return

    def _sync_task(self, task: SyncTask):
        plan, epoch = self.plan, self.plan.epochs[task.epoch]
        batch = Batch(task.epoch, task.step, samples(plan, task.epoch, task.start, task.stop))
        begins = stream(epoch.samples, plan.update.batches, task.index).start
        leaves = epoch.leave is not None and (task.start - begins) // epoch.batch_size >= epoch.leave.batch
        is_skipped_ = is_skipped(plan, batch)
        pulled = None
        if not is_skipped_ or plan.reads_before_skipping:
            pulled = yield from self._pull(task, task.step, batch)
        if leaves and not epoch.leave.stepped:
            raise _Left
        contributed = False
        if not is_skipped_:
            found = yield from self._gradients(task, task.step, batch, pulled)
            try:
                yield from self.trainer.push(task, task.step, task.index, batch.ids.size, *found)
                contributed = True
            except PushRefused:
                assert plan.poison
        if contributed or not leaves:
            self._done = TrainDone(task.generation, task.attempt, contributed, {})
        if leaves:
            raise _Left

    def _async_task(self, task: AsyncTask):
        plan, size = self.plan, self.plan.epochs[task.epoch].batch_size
        ids = samples(plan, task.epoch, task.start, task.stop)
        leave = plan.epochs[task.epoch].leave
        pushing, ahead = None, None
        try:
            count = -(-ids.size // size)
            for number in range((yield from self.trainer.where(task)), count):
                batch = self._batch(task, ids, size, number)
                pulled = yield from ahead or self._pull(task, NEWEST, batch)
                ahead = None
                if plan.ahead and number + 1 < count:
                    ahead = begun(self._pull(task, NEWEST, self._batch(task, ids, size, number + 1)))
                leaves = leave is not None and task.start // size + number >= leave.batch
                if leaves and not leave.stepped:
                    raise _Left
                found = ([], [], [])
                if not is_skipped(plan, batch):
                    found = yield from self._gradients(task, NEWEST, batch, pulled)
                yield from pushing or ()
                pushing = begun(self._push_batch(task, number, found))
                if leaves:
                    raise _Left
                if ahead is None:
                    yield from pushing
                    pushing = None
        except _Left:
            with suppress(Void):
                yield from pushing or ()
            raise
        finally:
            for flow in (pushing, ahead):
                if flow is not None:
                    flow.close()
        self._done = TrainDone(task.generation, task.attempt, True, {})

    def _batch(self, task: AsyncTask, ids, size, number):
        return Batch(task.epoch, task.first + number, ids[number * size : (number + 1) * size])

    def _push_batch(self, task: AsyncTask, number, found):
        """Push a batch; one that is refused counts as done with nothing in it."""
        try:
            yield from self.trainer.push_batch(task, number, *found)
        except PushRefused:
            assert self.plan.poison
            yield from self.trainer.push_batch(task, number, [], [])

    def _pull(self, task, version, batch):
        keys = [] if self.plan.pulls_late else keys_of(self.plan, batch)
        return (yield from self.trainer.pull(task.generation, version, keys, self._all_groups(), evaluating=False))

    def _gradients(self, task, version, batch, pulled):
        yield from self._compute()
        rows = pulled.rows
        if self.plan.pulls_late:
            rows = yield from self._pull_rows(task, version, batch)
        return gradients(self.plan, batch, rows, pulled.groups)

    def _pull_rows(self, task, version, batch):
        """Rows met only while computing. Where the version has passed, the batch is void already: any will do."""
        keys = keys_of(self.plan, batch)
        try:
            return (yield from self.trainer.pull(task.generation, version, keys, [], False)).rows
        except Void as void:
            return (yield from self.trainer.pull(void.generation, NEWEST, keys, [], False)).rows

    def _all_groups(self):
        return range(len(self.plan.schema.groups))

    # -- evaluating and saving -----------------------------------------------------------------------------------------

    def _evaluate(self, epoch, ordinal, data):
        while True:
            answer = yield from self._ask(WantTotals(epoch, ordinal, data))
            if isinstance(answer, TotalsAre):
                break
            assert isinstance(answer, EvalTask)
            keys = evaluated_keys(self.plan, epoch, answer.start, answer.stop)
            try:
                pulled = yield from self.trainer.pull(
                    answer.generation, answer.version, keys, self._all_groups(), evaluating=True
                )
            except Void:
                continue
            yield from self._compute()
            found = evaluated(pulled.rows, pulled.groups)
            self._done = EvalDone(answer.generation, answer.attempt, {"sum": partial(found)})
        totals = answer.totals["sum"].values if answer.totals else np.zeros(0)
        self._notes.totals((epoch, ordinal), totals)
        if (yield from self.trainer.is_leader()):
            yield from self.trainer.report(epoch, {"sum": float(totals.sum())})

    def _saves(self, count):
        for ordinal in range(count):
            while not isinstance(answer := (yield from self._ask(WantSaved(self._place, ordinal, "model"))), Over):
                self._done = yield from self._save(answer, (self._place, ordinal))

    def _save(self, task: SaveTask, call: Call):
        try:
            model = yield from self._export(task)
            if not (yield from self.trainer.is_leader()):
                raise Void(task.generation)
        except CheckpointError as exc:
            return SaveDone(task.generation, task.attempt, f"save_model: {exc}")
        except Void:
            return None
        self._notes.saved_model(call, model)
        return SaveDone(task.generation, task.attempt)

    def _export(self, task: SaveTask):
        pulled = yield from self.trainer.pull(task.generation, task.version, [], self._all_groups(), evaluating=True)
        counts = yield from self.trainer.count_rows(task)
        model = {group: values.tobytes() for group, values in enumerate(pulled.groups)}
        places = self.trainer.places()
        for table, count in enumerate(counts):
            for part in PARTS:
                pieces = []
                for place in range(places):
                    slot = slots_owned(place, places).start
                    while slot is not None:
                        piece = yield from self.trainer.export(task, table, part, place, slot)
                        pieces.append(piece.part.tobytes())
                        slot = piece.next_slot
                model[table, part] = b"".join(pieces)
            if len(model[table, ExportPart.KEYS]) != 8 * count:
                raise CheckpointError("fewer or more rows than were counted")
        return model


def begun(flow):
    """The rest of a flow whose first requests are on their way."""
    try:
        next(flow)
    except StopIteration as stop:
        result = stop.value

        def finished():
            return result
            yield

        return finished()
    return flow
