"""What a simulated trainer's script does: `job/job.py` in small, with arithmetic in place of torch.

Its gradients are a pure function of what it pulled and of the samples of its task, made of element-wise float32
arithmetic, so that any two runs that keep the promises end with the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evergrad import init_rows
from evergrad.data.order import epoch_order
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    AsyncTask,
    Attempt,
    BreakDone,
    DataSpec,
    EvalDone,
    EvalTask,
    ExportPart,
    GroupKind,
    GroupSpec,
    InitTask,
    Over,
    ParameterSpec,
    Raised,
    SaveDone,
    SaveTask,
    Schema,
    SyncTask,
    TableSpec,
    TotalsAre,
    TrainDone,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEnd,
    WantEpoch,
    WantSaved,
    WantTotals,
)
from evergrad.metrics import partial
from evergrad.optim import SGD, Adagrad, Adam
from evergrad.placement import slots_owned
from evergrad.trainer.accumulated import Accumulated
from evergrad.trainer.exchange import Flow
from evergrad.trainer.trainer import PushRefused, RowGrads, SpanGrads, Trainer, Void

SEED = 5
USERS, COUNTS = 0, 1
TRAINED, APPLIED, AVERAGED, LOWEST, FROZEN = range(5)
PARTS = (ExportPart.KEYS, ExportPart.VALUES)


@dataclass(frozen=True)
class Plan:
    """What is trained.

    `break_at`: in this epoch every script leaves its loop at a task of this step or a later one (in `Async` after the
    first batch of this task or a later one). `skips`: some batches are passed over, with nothing pulled and nothing
    pushed. `raises_at`: the script raises in batches with these samples.
    """

    update: UpdateSpec
    samples: int = 23
    batch_size: int = 2
    epochs: int = 2
    break_at: tuple[int, int] | None = None
    skips: bool = False
    raises_at: frozenset[int] = frozenset()

    @property
    def is_sync(self) -> bool:
        return self.update.name is UpdateName.SYNC

    @property
    def data(self) -> DataSpec:
        return DataSpec(self.samples, "simulated", self.batch_size)

    @property
    def schema(self) -> Schema:
        tables = (
            TableSpec("users", 2, Adagrad().spec(), init_rows.normal()),
            TableSpec("counts", 1, SGD().spec(), init_rows.zeros()),
        )
        groups = (
            _group(GroupKind.TRAINED, Adam().spec(), 3, 4),
            _group(GroupKind.TRAINED, SGD().spec(), 6),
            _group(GroupKind.AVERAGED, None, 3),
            _group(GroupKind.LOWEST, None, 2),
            _group(GroupKind.FROZEN, None, 3),
        )
        return Schema(SEED, self.update, tables, groups)

    def batches(self) -> int:
        """Batches of all epochs in `Async`."""
        return self.epochs * -(-self.samples // self.batch_size)


def _group(kind: GroupKind, rule, *sizes: int) -> GroupSpec:
    dtype = "int64" if kind is GroupKind.LOWEST else "float32"
    return GroupSpec(kind, rule, tuple(ParameterSpec(f"{kind}{i}{n}", (n,), dtype) for i, n in enumerate(sizes)))


def initial_values(schema: Schema) -> list[SpanGrads]:
    """The dense values every script starts with."""
    spans = []
    for number, group in enumerate(schema.groups):
        dtype = np.int64 if group.kind is GroupKind.LOWEST else np.float32
        values = np.arange(1, group.size + 1).astype(dtype)
        spans.append(SpanGrads(number, 0.0, values, np.ones(len(group.parameters), np.uint8)))
    return spans


def user_of(ids):
    """Which key a sample has: few, so that tasks of one step share some; the ends of the range among them."""
    keys = np.array([0, -1, 2**63 - 1, -(2**63), 77, 78, 79], np.int64)
    return keys[(ids * ids + 3) % keys.size]


def count_key(epoch, ids):
    """A key of the table `counts` for each sample of each epoch."""
    return ids * 1_000 + epoch


class _ScriptRaised(Exception):
    """The script raises in a task."""


class _LoopLeft(Exception):
    """The script leaves its loop over batches."""


class Script:
    """One trainer's script.

    Args:
        plan: what is trained.
        trainer: the real conversation with the job.
        compute: a flow that takes as long as computing a batch does.
        pushed: told of every attempt and the samples it is for.
        saved: told of every model written.
        totals: told of every evaluation's result.
    """

    def __init__(
        self,
        plan: Plan,
        trainer: Trainer,
        compute: Callable[[], Flow[None]],
        pushed: Callable[[Attempt, int, np.ndarray], None],
        saved: Callable[[dict], None],
        totals: Callable[[int, list[float]], None],
    ) -> None:
        self.plan, self.trainer = plan, trainer
        self._compute, self._pushed, self._saved, self._totals = compute, pushed, saved, totals
        self._done = None

    def run(self) -> Flow[None]:
        try:
            yield from self._run()
        except _ScriptRaised as raised:
            yield from self.trainer.leave("raised: a traceback", raised.args[0])

    def _run(self) -> Flow[None]:
        plan = self.plan
        yield from self.trainer.join()
        yield from self.trainer.agree(plan.schema)
        epoch = -1
        while (answer := (yield from self._ask(WantEpoch(epoch, plan.epochs)))).epoch is not None:
            epoch = answer.epoch
            yield from self._batches(epoch)
            yield from self._evaluate(epoch)
        yield from self._save(plan.epochs)
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
                yield from self.trainer.push(answer, INIT_STEP, 0, 1, [], initial_values(self.plan.schema))
            except Void:
                continue
            self._done = TrainDone(answer.generation, answer.attempt, True, {})

    def _batches(self, epoch):
        while True:
            task = yield from self._ask(WantBatch(epoch, self.plan.data))
            if isinstance(task, Over):
                return
            try:
                yield from self._sync_task(task) if isinstance(task, SyncTask) else self._async_task(task)
            except Void:
                continue
            except _LoopLeft:
                self._done = BreakDone(epoch, 0)
                return

    def _leaves(self, task, number):
        at = self.plan.break_at
        return at is not None and at[0] == task.epoch and number >= at[1]

    def _raise_at(self, task, ids, batches):
        """Raise as a script that does not like one of these samples."""
        if self.plan.raises_at.intersection(ids.tolist()):
            raise _ScriptRaised(Raised(task.generation, task.attempt, batches, "ValueError: bad"))

    def _sync_task(self, task: SyncTask):
        if self._leaves(task, task.step):
            raise _LoopLeft
        ids = self._ids(task)
        self._raise_at(task, ids, 0)
        if self.plan.skips and task.step % 3 < 2 and task.index < 2:
            self._done = TrainDone(task.generation, task.attempt, False, {})
            return
        rows, spans = yield from self._gradients(task, task.step, ids)
        self._pushed(task.attempt, task.epoch, ids)
        yield from self.trainer.push(task, task.step, task.index, ids.size, rows, spans)
        self._done = TrainDone(task.generation, task.attempt, True, {})

    def _async_task(self, task: AsyncTask):
        """As `job/asynchronous.py`, without reading ahead."""
        ids, size, update = self._ids(task), self.plan.batch_size, self.plan.update
        parts = [ids[start : start + size] for start in range(0, ids.size, size)]
        first = yield from self.trainer.where(task)
        for number in range(first, len(parts)):
            if number % update.push_every == 0:
                begin, group = number, Accumulated(self.plan.schema)
                stop = min(number + update.push_every, len(parts))
                samples = sum(part.size for part in parts[begin:stop])
            if update.max_staleness is not None:
                yield from self.trainer.may_begin(task, number - first)
            part = parts[number]
            self._raise_at(task, part, begin)
            rows, spans = yield from self._gradients(task, NEWEST, part, samples / part.size, stop - begin)
            group.add(rows, spans, part.size, ())
            if number + 1 == stop:
                yield from self.trainer.push_batch(task, begin, *group.together(), stop - begin)
            if self._leaves(task, task.task):
                raise _LoopLeft
        self._done = TrainDone(task.generation, task.attempt, True, {})

    def _ids(self, task):
        return epoch_order(self.plan.samples, SEED, task.epoch, np.arange(task.start, task.stop))

    def _gradients(self, task, version, ids, share=1, batches=1):
        """The gradients of a batch that has one of `share` parts in an update of so many `batches`.

        Those that are counted come to -1 a sample, and -1 a batch.
        """
        users = np.unique(user_of(ids))
        counts = np.sort(count_key(task.epoch, ids))
        wanted = [(USERS, users), (COUNTS, counts)]
        pulled = yield from self.trainer.pull(task.generation, version, wanted, range(5), evaluating=False)
        yield from self._compute()
        sums = np.zeros(users.size, np.float32)
        np.add.at(sums, np.searchsorted(users, user_of(ids)), (ids % 5).astype(np.float32))
        of_users = pulled.rows[USERS] * np.float32(0.25) + sums[:, None]
        rows = [
            RowGrads(USERS, 0.1, users, of_users),
            RowGrads(COUNTS, 1.0, counts, np.full((counts.size, 1), -share, "f4")),
        ]
        shift = np.float32(int(ids.sum()) % 7)
        flags = np.ones(1, np.uint8)
        present = np.array([1, ids[0] % 2], np.uint8)  # a parameter that some tasks do not use
        spans = [
            SpanGrads(TRAINED, 0.05, pulled.groups[TRAINED] * np.float32(0.5) + shift, present),
            SpanGrads(APPLIED, 1.0, np.full(6, -batches, np.float32), flags),
            SpanGrads(AVERAGED, 0.0, pulled.groups[AVERAGED] * np.float32(0.75) + shift, flags),
            SpanGrads(LOWEST, 0.0, pulled.groups[LOWEST] * 3 + ids[0], flags),
        ]
        return rows, spans

    def _evaluate(self, epoch):
        data = DataSpec(7, "valid", 3)
        while True:
            answer = yield from self._ask(WantTotals(epoch, 0, data))
            if isinstance(answer, TotalsAre):
                self._totals(epoch, answer.totals["sum"].values.tolist())
                return
            assert isinstance(answer, EvalTask)
            users = np.unique(user_of(np.arange(answer.start, answer.stop)))
            try:
                pulled = yield from self.trainer.pull(
                    answer.generation, answer.version, [(USERS, users)], [TRAINED], evaluating=True
                )
            except Void:
                continue
            yield from self._compute()
            total = np.array([float(pulled.rows[0].astype("f8").sum()), float(pulled.groups[0].sum())])
            self._done = EvalDone(answer.generation, answer.attempt, {"sum": partial(total)})

    def _save(self, place):
        while True:
            answer = yield from self._ask(WantSaved(place, 0, "model"))
            if isinstance(answer, Over):
                return
            failure = None
            try:
                model = yield from self._export(answer)
                self._saved(model)
            except (Void, PushRefused) as exc:
                failure = str(exc)
            self._done = SaveDone(answer.generation, answer.attempt, failure)

    def _export(self, task: SaveTask):
        counts = yield from self.trainer.count_rows(task)
        model = {}
        places = self.trainer.places()
        for table, count in enumerate(counts):
            for part in PARTS:
                pieces = []
                for place in range(places):
                    slot = slots_owned(place, places).start
                    while slot is not None:
                        piece = yield from self.trainer.export(task, table, part, place, slot)
                        pieces.append(piece.part)
                        slot = piece.next_slot
                model[table, part] = np.concatenate(pieces).tobytes()
            assert len(model[table, ExportPart.KEYS]) == 8 * count
        pulled = yield from self.trainer.pull(task.generation, task.version, [], range(5), evaluating=True)
        return model | {group: values.tobytes() for group, values in enumerate(pulled.groups)}
