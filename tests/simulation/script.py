"""What a simulated trainer's script does: `job/job.py` in small, with arithmetic in place of torch."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
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
    Raised,
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
from evergrad.trainer.accumulated import Accumulated
from evergrad.trainer.exchange import Flow
from evergrad.trainer.trainer import PulledModel, PushRefused, Trainer, Void

from .arithmetic import (
    ALONE,
    Batch,
    Gradients,
    batches_at,
    batches_of,
    evaluated,
    evaluated_keys,
    gradients,
    group_of,
    initial_values,
    is_poisoned,
    is_skipped,
    keys_of,
    poisoned,
    raises,
    samples,
    wired,
)
from .local import local_model, step_locally
from .oracle import PARTS, Call
from .plan import OUTER_RATE, Plan

NOT_PREPARED = (None, None)


class Notes(Protocol):
    """What is told of what scripts have seen and done."""

    def saved_model(self, call: Call, model: dict) -> None:
        """A model was put where it belongs."""

    def totals(self, call: Call, totals: np.ndarray) -> None:
        """An evaluation has this result."""


class _Left(Exception):
    """The script leaves its loop over batches."""


class _Raised(Exception):
    """The script raises in a task, of which all pservers have applied so many batches."""

    def __init__(self, task: SyncTask | AsyncTask, batches: int) -> None:
        super().__init__(Raised(task.generation, task.attempt, batches, "ValueError: bad"))


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
        self._local = local_model(plan)
        self._held = Held()
        self._prepared = NOT_PREPARED
        self._done = None
        self._has_stepped = False
        self._place = -1

    def run(self) -> Flow[bool]:
        """Returns true where the script has raised, so that the process is to be started again."""
        try:
            yield from self._run()
        except _Raised as raised:
            yield from self.trainer.leave("raised: a traceback", raised.args[0])
        return True

    def _run(self) -> Flow[None]:
        plan = self.plan
        yield from self.trainer.join()
        yield from self.trainer.agree(plan.schema, plan.offer)
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
                left = self._done if isinstance(self._done, BreakDone) else BreakDone(epoch, 0)
                self._done = msgspec.structs.replace(left, left_until=until)
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
                self._take_prepared(None)
                return
            if self._saves_now(task):
                yield from self.trainer.ask_checkpoint()
            try:
                match task:
                    case SyncTask() if self.plan.is_local:
                        yield from self._local_task(task)
                    case SyncTask():
                        yield from self._sync_task(task)
                    case AsyncTask():
                        yield from self._async_task(task)
            except Void:
                continue
            except _Left:
                version = None if isinstance(task, AsyncTask) else task.step + self._has_stepped
                self._done = BreakDone(epoch, 0, self._done, task.generation, version)
                return

    def _saves_now(self, task):
        saves = self.plan.checkpoints
        return saves is not None and saves.is_asked and task.start % 5 == 3

    def _sync_task(self, task: SyncTask):
        plan, leave = self.plan, self.plan.epochs[task.epoch].leave
        batch = Batch(task.epoch, task.step, samples(plan, task.epoch, task.start, task.stop))
        leaves = self._leaves(task)
        pulled = None
        if not is_skipped(plan, batch) or plan.reads_before_skipping:
            pulled = yield from self._pull(task, task.step, batch)
        self._has_stepped = False
        if leaves and not leave.stepped:
            raise _Left
        contributed = False
        if raises(plan, batch):
            raise _Raised(task, 0)
        if not is_skipped(plan, batch):
            found = yield from self._gradients(task, task.step, batch, pulled)
            contributed = yield from self._hand_in(task, batch.ids.size, found, leaves)
        if contributed or not leaves:
            self._done = TrainDone(task.generation, task.attempt, contributed, {})
        if leaves:
            raise _Left

    def _local_task(self, task: SyncTask):
        """Steps of the trainer's own, and what they come to; a script that leaves hands in what there is."""
        plan, local, leave = self.plan, self._local, self.plan.epochs[task.epoch].leave
        whole = Batch(task.epoch, task.first, samples(plan, task.epoch, task.start, task.stop))
        local.forget()
        self._has_stepped, leaves = False, self._leaves(task)
        for batch in batches_of(plan, whole):
            if leaves and not leave.stepped:
                break
            if raises(plan, batch):
                raise _Raised(task, 0)
            if not is_skipped(plan, batch):
                yield from self._local_step(task, batch)
            if leaves:
                break
        if local.samples or not leaves:
            contributed = False
            if local.samples:
                found = Gradients(*local.difference(OUTER_RATE), local.evict)
                found = poisoned(whole, found) if is_poisoned(plan, whole) else found
                contributed = yield from self._hand_in(task, local.samples, found, leaves)
                self._has_stepped = True
            self._done = TrainDone(task.generation, task.attempt, contributed, {})
        if leaves:
            raise _Left

    def _local_step(self, task: SyncTask, batch: Batch):
        local = self._local
        missing, groups = local.missing(keys_of(self.plan, batch)), [] if local.has_values else self._all_groups()
        if missing or groups or not local.has_values:
            pulled = yield from self.trainer.pull(task.generation, task.step, missing, groups, evaluating=False)
            for (table, keys), rows in zip(missing, pulled.rows, strict=True):
                local.take_rows(table, keys, rows)
            if not local.has_values:
                local.take_dense(pulled.groups)
        yield from self._compute()
        step_locally(self.plan, local, batch)

    def _leaves(self, task: SyncTask):
        """Whether the script leaves its loop at this task."""
        begins = stream(self.plan.epochs[task.epoch].samples, self.plan.update.batches, task.index).start
        return self.plan.is_left(task.epoch, (task.start - begins) // self.plan.task_samples(task.epoch))

    def _hand_in(self, task: SyncTask, count: int, found: Gradients, leaves: bool):
        """Push; a script that leaves its loop does so with a task that counts no more, too."""
        try:
            contributed = self._has_stepped = yield from self._push(task, count, found)
        except Void:
            if not leaves:
                raise
            self._has_stepped = True
            raise _Left from None
        return contributed

    def _push(self, task: SyncTask, count: int, found: Gradients):
        """Push what a task contributes; returns whether all pservers hold it."""
        try:
            yield from self.trainer.push(task, task.step, task.index, count, *wired(self.plan, found))
        except PushRefused:
            assert self.plan.poison
            return False
        return True

    def _async_task(self, task: AsyncTask):
        """As `job/asynchronous.py`."""
        plan, size, update = self.plan, self.plan.epochs[task.epoch].batch_size, self.plan.update
        leave = plan.epochs[task.epoch].leave
        batches = batches_at(plan, task.epoch, task.batches)
        ahead, pushing = self._take_prepared(task), None
        following = None if task.following is None else batches_at(plan, task.epoch, task.following)[0]
        try:
            first = yield from self.trainer.where(task)
            if first and ahead is not None:
                ahead.close()
                ahead = None
            for number in range(first, len(batches)):
                batch = batches[number]
                if number % update.push_every == 0:
                    begin, together = number, Accumulated(plan.schema)
                    stop = min(number + update.push_every, len(batches))
                    group = group_of(plan, batches[begin:stop])
                if update.max_staleness is not None:
                    yield from self.trainer.may_begin(task, number - first)
                pulled = yield from ahead or self._pull_held(task, batch, number, first)
                ahead = None
                if plan.ahead and number + 1 < len(batches):
                    ahead = begun(self._pull_held(task, batches[number + 1], number + 1, first))
                elif plan.ahead and following is not None:
                    ahead = begun(self._pull_held(task, following, 0, 0))
                leaves = leave is not None and task.start // size + number >= leave.batch
                if leaves and not leave.stepped:
                    raise _Left
                if raises(plan, batch):
                    raise _Raised(task, begin)
                if not is_skipped(plan, batch):
                    found = yield from self._gradients(task, NEWEST, batch, pulled, group)
                    together.add(found.rows, found.spans, batch.ids.size, found.evict)
                if number + 1 == stop:
                    yield from pushing or ()
                    pushing = begun(self._push_batches(task, begin, stop - begin, together.together()))
                if leaves:
                    raise _Left
                if ahead is None or number + 1 == len(batches):
                    yield from pushing or ()
                    pushing = None
            if ahead is not None:
                self._prepared, ahead = ((task.generation, task.epoch, task.following.task), ahead), None
        except (_Left, _Raised):
            with suppress(Void):
                yield from pushing or ()
            raise
        except Void:
            with suppress(Void):
                yield from pushing or ()
            return
        finally:
            for flow in (pushing, ahead):
                if flow is not None:
                    flow.close()
        self._done = TrainDone(task.generation, task.attempt, True, {})

    def _take_prepared(self, task: AsyncTask | None):
        """What is on its way for this task, if it is the one that was to follow; it is given up otherwise."""
        (of, ahead), self._prepared = self._prepared, NOT_PREPARED
        if ahead is not None and (task is None or of != (task.generation, task.epoch, task.task)):
            ahead.close()
            ahead = None
        return ahead

    def _push_batches(self, task: AsyncTask, first, count, together):
        """Push a group of batches; one that is refused counts as done with nothing in it."""
        try:
            yield from self.trainer.push_batch(task, first, *together, count)
        except PushRefused:
            assert self.plan.poison
            yield from self.trainer.push_batch(task, first, [], [], (), count)

    def _pull_held(self, task: AsyncTask, batch: Batch, number: int, first: int):
        """What a batch needs; with `pull_every` only what has not been pulled before."""
        every = self.plan.update.pull_every
        if every == 1:
            return (yield from self._pull(task, NEWEST, batch))
        if number == first or number % every == 0:
            self._held = Held()
        held = self._held
        wanted = [] if self.plan.pulls_late else held.missing(keys_of(self.plan, batch))
        groups = self._all_groups() if held.groups is None else []
        if wanted or groups:
            pulled = yield from self.trainer.pull(task.generation, NEWEST, wanted, groups, evaluating=False)
            held.take(wanted, pulled.rows, pulled.groups if groups else held.groups)
        rows = [] if self.plan.pulls_late else held.rows(keys_of(self.plan, batch))
        return PulledModel(NEWEST, rows, held.groups or [])

    def _pull(self, task, version, batch):
        keys = [] if self.plan.pulls_late else keys_of(self.plan, batch)
        return (yield from self.trainer.pull(task.generation, version, keys, self._all_groups(), evaluating=False))

    def _gradients(self, task, version, batch, pulled, group=ALONE):
        yield from self._compute()
        rows = pulled.rows
        if self.plan.pulls_late:
            rows = yield from self._pull_rows(task, version, batch)
        return gradients(self.plan, batch, rows, pulled.groups, group)

    def _pull_rows(self, task, version, batch):
        """Rows met only while computing. Where the version has passed, the batch is void already: any will do."""
        keys = keys_of(self.plan, batch)
        try:
            return (yield from self.trainer.pull(task.generation, version, keys, [], False)).rows
        except Void as void:
            generation = void.generation
        try:
            return (yield from self.trainer.pull(generation, NEWEST, keys, [], False)).rows
        except Void:  # the pservers of this generation are gone, or not there yet
            return [np.zeros((wanted.size, self.plan.kinds[table].spec.dim), np.float32) for table, wanted in keys]

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
            saves, total = self.plan.checkpoints, float(totals.sum())
            best = total if saves is not None and saves.is_rated else None
            yield from self.trainer.report(epoch, {"sum": total}, best)

    def _saves(self, count):
        for ordinal in range(count):
            while not isinstance(answer := (yield from self._ask(WantSaved(self._place, ordinal, "model"))), Over):
                self._done = yield from self._save(answer, (self._place, ordinal))

    def _save(self, task: SaveTask, call: Call):
        try:
            model = yield from self._export(task)
            if not (yield from self.trainer.is_leader(task.attempt)):
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


class Held:
    """Rows and dense values that are used for several batches."""

    def __init__(self) -> None:
        self.groups: list[np.ndarray] | None = None
        self._rows: dict[tuple[int, int], np.ndarray] = {}

    def missing(self, wanted):
        """Of different keys by table those whose rows are not here."""
        found = [(t, keys[[(t, key) not in self._rows for key in keys.tolist()]]) for t, keys in wanted]
        return [(table, keys) for table, keys in found if keys.size]

    def take(self, wanted, rows, groups):
        """What was pulled."""
        self.groups = groups
        for (table, keys), values in zip(wanted, rows, strict=True):
            self._rows.update({(table, key): value for key, value in zip(keys.tolist(), values, strict=True)})

    def rows(self, wanted):
        """The rows of these keys, which are here."""
        return [np.stack([self._rows[table, key] for key in keys.tolist()]) for table, keys in wanted]


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
