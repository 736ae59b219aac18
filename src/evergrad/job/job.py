"""`eg.init` and the `Job` it returns: what a training script calls."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any
from weakref import ref

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evergrad.checkpoint.plan import Checkpoints
from evergrad.checkpoint.storage import absolute_url, shared_url
from evergrad.checks import whole_number
from evergrad.data.dataset import Dataset, reads_anywhere
from evergrad.data.order import epoch_order
from evergrad.errors import ConfigError
from evergrad.heap import keep_freed_memory
from evergrad.job.ahead import Ahead, Reader
from evergrad.job.alignment import aligned
from evergrad.job.arguments import added, data_of, folder_of, frames_to_the_script, numbers_of, partials, seed_of
from evergrad.job.asynchronous import AsyncTasks
from evergrad.job.batch import Fetched, OpenBatch, Read, mixed_seed, seed_generators
from evergrad.job.bound import BoundModel, Version
from evergrad.job.dense import NotFinite, Rules
from evergrad.job.held_rows import HeldRows
from evergrad.job.numerics import fingerprint
from evergrad.job.optimizer import JobOptimizer
from evergrad.job.saving import save
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    AsyncTask,
    BreakDone,
    DataSpec,
    EpochIs,
    EvalDone,
    EvalTask,
    InitTask,
    Over,
    Partial,
    SaveTask,
    Schema,
    SyncTask,
    TaskBatches,
    TotalsAre,
    TrainDone,
    Want,
    WantBatch,
    WantEpoch,
    WantSaved,
    WantTotals,
    Wire,
)
from evergrad.metrics import mean, result
from evergrad.optim import fixed_rate
from evergrad.trainer import session as sessions
from evergrad.trainer.session import AtTask, Session
from evergrad.trainer.trainer import NO_OFFER, Answer, Offer, PushRefused, Void
from evergrad.update import Async, LocalSGD, Sync, Update

Batches = Generator[Any, None, None]


def init(
    update: Update | None = None,
    *,
    seed: int = 0,
    threads: int = 1,
    wire: str = "float32",
    checkpoints: Checkpoints | None = None,
    warm_start: str | os.PathLike[str] | None = None,
) -> "Job":
    """Take part in a job: the one that `evergrad run` started this process for, else one inside this process.

    Random generators of Python, numpy and torch are seeded, so that every trainer makes the same model.

    Args:
        update: the update rule; `Sync()` if not given.
        seed: the job's seed, from which all its random numbers follow; `evergrad run --seed` goes before it.
        threads: how many threads torch computes with, the same however the job is started.
        wire: what rows and their gradients are on the wire: "float32", or "bfloat16" or "float16" for half the bytes;
            the pservers keep and update float32.
        checkpoints: where and when checkpoints are made; `evergrad run --checkpoints` goes before its URL. A job that
            finds some there goes on with the newest.
        warm_start: a checkpoint whose rows and parameters a new job begins with, at epoch 0: a folder or URL as
            `evergrad checkpoints show` takes it.

    Raises:
        ConfigError: an argument that makes no sense, or the job refuses this process.
    """
    if not isinstance(update, Update | None):
        raise ConfigError(f"update is {update!r}; give eg.Sync(...), eg.Async(...) or eg.LocalSGD(...)")
    spec = (Sync() if update is None else update).spec()
    seed = seed_of(os.environ.get(sessions.SEED, seed))
    threads = whole_number("threads", threads, least=1)
    if wire not in list(Wire):
        raise ConfigError(f"wire is {wire!r}; give one of {', '.join(Wire)}")
    torch.set_num_threads(threads)
    keep_freed_memory()
    if not isinstance(checkpoints, Checkpoints | None):
        raise ConfigError(f"checkpoints is {checkpoints!r}; give eg.Checkpoints(url, ...)")
    is_embedded = sessions.MASTER not in os.environ
    place_of = absolute_url if is_embedded else shared_url
    offer = Offer("", checkpoints.spec(place_of) if checkpoints else None, place_of(warm_start) if warm_start else None)
    session = _embedded() if is_embedded else sessions.connect(os.environ, fingerprint())
    seed_generators(seed)
    is_ahead = isinstance(update, Async) and update.ahead
    local = update if isinstance(update, LocalSGD) else None
    return Job(session, Schema(seed, spec, (), (), Wire(wire)), is_embedded, is_ahead, local, checkpoints, offer)


def _embedded() -> Session:
    # Imported here: a trainer among other processes starts without the master, and sooner.
    from evergrad.job.embedded import embedded_session

    return embedded_session()


class Job:
    """A training run as this process sees it. Made by `init`.

    Everything that waits for other processes waits as long as it takes; what happens to them never raises here. When
    the job ends elsewhere, the script is left by a `SystemExit`.
    """

    def __init__(
        self,
        session: Session,
        schema: Schema,
        is_embedded: bool,
        is_ahead: bool = False,
        local: LocalSGD | None = None,
        checkpoints: Checkpoints | None = None,
        offer: Offer = NO_OFFER,
    ) -> None:
        self._session, self._local = session, local
        self._checkpoints, self._offer = checkpoints, offer
        self._schema = schema
        self._is_embedded = is_embedded
        self._async = AsyncTasks(session, is_ahead, self._enter, self._warn_if_no_step, self._warn)
        self._bound: BoundModel | None = None
        self._optimizer: JobOptimizer | None = None
        self._until = 0
        self._place = -1
        self._epoch: int | None = None
        self._trained_epoch: int | None = None
        self._calls: Counter[tuple[str, int]] = Counter()
        self._batch: OpenBatch | None = None
        self._is_evaluating = False
        self._loop: Callable[[], Batches | None] = lambda: None
        self._warned: set[str] = set()

    # -- the model -----------------------------------------------------------------------------------------------------

    def optimizer(self, model: nn.Module, *, dense: Rules | None = None, sparse: Rules | None = None) -> JobOptimizer:
        """Bind the job's model; returns a `torch.optim.Optimizer` whose steps are taken on the pservers.

        With `LocalSGD` they are taken here, with these rules in place of its `inner=`.

        Args:
            model: any torch model; its `eg.Embedding` and `eg.EmbeddingBag` modules are the tables.
            dense: the rule for parameters, or rules by pattern of parameter names (the first that fits counts).
            sparse: the rule for tables, or rules by table name or pattern; a table's own `optimizer=` goes before it.

        Raises:
            ConfigError: a parameter or table without a rule, or the other trainers have another model.
        """
        if self._bound is not None:
            raise ConfigError("job.optimizer() was called twice; a job trains one model: put its parts into one module")
        local = self._local
        if local is not None:
            dense, sparse = local.inner if dense is None else dense, local.inner if sparse is None else sparse
        bound = BoundModel(self._session, model, dense, sparse, self._schema.wire, local)
        optimizer = JobOptimizer(self, bound.groups, bound.table_rules())
        groups, inner = tuple(group.spec for group in bound.groups), bound.inner_rules()
        rates = optimizer.fixed_rates() + (() if local is None else (fixed_rate(local.outer),))
        schema = msgspec.structs.replace(self._schema, tables=bound.tables, groups=groups, rates=rates, inner=inner)
        offer = self._offer._replace(initial=bound.initial_digest())
        self._session.driver.run(self._session.trainer.agree(schema, offer))
        self._schema, self._bound, self._optimizer = schema, bound, optimizer
        return optimizer

    # -- loops ---------------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Generator[int, None, None]:
        """The numbers of epochs, from 0 or, for a trainer that joins late, from where the job is.

        Leaving the loop early ends it for all trainers. A further loop goes on where the last one ended.
        """
        self._check_bound("epochs")
        count = whole_number("job.epochs: the number of epochs", count, least=0)
        if self._epoch is not None:
            raise ConfigError("job.epochs() inside job.epochs(): end the outer loop first")
        first, self._until = self._until, self._until + count
        epoch = first - 1
        try:
            while True:
                if (loop := self._loop()) is not None:
                    loop.close()
                answer = self._ask(WantEpoch(epoch, self._until))
                assert isinstance(answer, EpochIs)
                if answer.epoch is None:
                    return
                epoch = self._epoch = self._place = answer.epoch
                self._session.inside = f"in the middle of epoch {epoch - first}"
                yield epoch - first
        except GeneratorExit:
            done = self._session.done
            left = done if isinstance(done, BreakDone) else BreakDone(epoch, 0)
            self._session.done = msgspec.structs.replace(left, left_until=self._until)
        finally:
            self._epoch, self._place, self._session.inside = None, self._until, ""

    def batches(self, dataset: object, batch_size: int, *, shuffle: bool = True) -> Batches:
        """This trainer's share of the epoch's batches, as the master hands them out.

        Args:
            dataset: a mapping of arrays, a dataset of `eg.data`, or a map-style torch dataset.
            batch_size: samples of a batch; the last ones of an epoch may have fewer.
            shuffle: whether each epoch has an order of its own.

        Raises:
            ConfigError: outside `job.epochs`, twice in one epoch, or the other trainers have other data.
            DataError: the data cannot be used.
        """
        self._check_bound("batches")
        if self._epoch is None:
            raise ConfigError(
                "job.batches() outside job.epochs(); write: for epoch in job.epochs(n): for batch in job.batches(...)"
            )
        if self._trained_epoch == self._epoch:
            raise ConfigError(
                "job.batches() was called twice in one epoch; put the data into one dataset, or use more epochs"
            )
        self._trained_epoch = self._epoch
        data, spec = data_of(dataset, batch_size, shuffle)
        loop = self._batches(self._epoch, data, spec, shuffle)
        self._loop = ref(loop)
        return loop

    def _batches(self, epoch: int, data: Dataset, spec: DataSpec, shuffle: bool) -> Batches:
        reader = Reader() if self._async.is_ahead and reads_anywhere(data) else None
        try:
            while True:
                task = self._ask(WantBatch(epoch, spec))
                if isinstance(task, SyncTask | AsyncTask):
                    version = task.step if isinstance(task, SyncTask) else None
                    self._session.task = AtTask(task.generation, task.attempt, version=version)
                match task:
                    case SyncTask() if self._local is not None:
                        yield from self._local_task(task, data, spec, shuffle)
                    case SyncTask():
                        yield from self._sync_task(task, data, spec, shuffle)
                    case AsyncTask():
                        yield from self._async_task(task, data, spec, shuffle, reader)
                    case Over():
                        return
        except BaseException:
            done, at = self._session.done, self._session.task
            last = done if isinstance(done, TrainDone) else None
            self._session.done = BreakDone(epoch, 0, last, *((at.generation, at.version) if at is not None else ()))
            raise
        finally:
            if reader is not None:
                reader.close()
            self._async.forget()
            self._close_batch()

    def _sync_task(self, task: SyncTask, data: Dataset, spec: DataSpec, shuffle: bool) -> Batches:
        ids = epoch_order(spec.samples, self._schema.seed, task.epoch, np.arange(task.start, task.stop), shuffle)
        seed = self._mixed_seed("task", task.epoch, task.step, task.index)
        batch = OpenBatch(task, task.step, ids.size)
        try:
            at = Version(task.generation, task.step)
            opened = self._enter(batch, self._fetch(at, data, ids, seed, training=True))
        except Void:
            return
        is_done = True
        try:
            yield opened
            self._warn_if_no_step(batch)
        except GeneratorExit:
            is_done = batch.contributed
            raise
        finally:
            if is_done and not batch.is_void:
                self._session.done = TrainDone(task.generation, task.attempt, batch.contributed, batch.metrics)

    def _local_task(self, task: SyncTask, data: Dataset, spec: DataSpec, shuffle: bool) -> Batches:
        """The batches of a task, each a step taken here; what they come to is handed in at the end, or at a `break`."""
        ids = epoch_order(spec.samples, self._schema.seed, task.epoch, np.arange(task.start, task.stop), shuffle)
        local, at = self._check_bound("batches").local, Version(task.generation, task.step)
        metrics: dict[str, Partial] = {}
        try:
            for number, start in enumerate(range(0, ids.size, spec.batch_size), task.first):
                self._session.driver.check()
                part = ids[start : start + spec.batch_size]
                batch = OpenBatch(task, number, part.size)
                seed = self._mixed_seed("task", task.epoch, number, task.index)
                opened = self._enter(batch, self._fetch(at, data, part, seed, training=True))
                try:
                    yield opened
                    self._warn_if_no_step(batch)
                finally:
                    metrics = added(metrics, batch.metrics)
            self._session.done = self._hand_in(task, metrics)
        except GeneratorExit:
            if local.samples:
                self._session.task = AtTask(task.generation, task.attempt, version=task.step + 1)
                self._session.done = self._hand_in(task, metrics)
            raise
        except Void:
            return
        finally:
            local.forget()

    def _hand_in(self, task: SyncTask, metrics: dict[str, Partial]) -> TrainDone | None:
        """Push what the steps of a task have come to; returns what to report, or None if it counts no more."""
        contributed = False
        try:
            contributed = self._check_bound("batches").push_difference(task)
        except Void:
            return None
        except (NotFinite, PushRefused) as exc:
            self._warn(f"the batches of a task were left out: {exc}", left_out=1)
        return TrainDone(task.generation, task.attempt, contributed, metrics)

    def _async_task(
        self, task: AsyncTask, data: Dataset, spec: DataSpec, shuffle: bool, reader: Reader | None
    ) -> Batches:
        at, size = Version(task.generation, NEWEST), spec.batch_size

        def reading(batches: TaskBatches) -> Ahead[Read]:
            def read(number: int) -> Read:
                begin = batches.start + number * size
                positions = np.arange(begin, min(begin + size, batches.stop))
                ids = epoch_order(spec.samples, self._schema.seed, task.epoch, positions, shuffle)
                seed = self._mixed_seed("task", task.epoch, batches.first + number, 0)
                return self._read(at, data, ids, seed, training=True)

            return Ahead(read, -(-(batches.stop - batches.start) // size), reader)

        request = partial(self._request, at, training=True)
        metrics = yield from self._async.run(task, self._schema, reading, request)
        if metrics is not None:
            self._session.done = TrainDone(task.generation, task.attempt, True, metrics)

    def evaluate(self, fn: Callable[[Any], Mapping[str, Any]], dataset: object, batch_size: int) -> dict[str, Any]:
        """Evaluate the model as it is now, the work shared out among the trainers; all get the same totals.

        Args:
            fn: computes metrics of one batch, by name: `eg.metrics.mean`, `eg.metrics.auc`, or a number or array, which
                are added up. It runs with the model in `eval()` and without gradients.
            dataset: as for `batches`.
            batch_size: samples of a batch.

        Raises:
            ConfigError: called inside `batches`.
        """
        bound = self._check_bound("evaluate", outside_batches=True)
        if not callable(fn):
            raise ConfigError(f"evaluate: {fn!r} is no function; give one that takes a batch and returns metrics")
        data, spec = data_of(dataset, batch_size, shuffle=False)
        ordinal = self._call("evaluate")
        modes = {module: module.training for module in bound.model.modules()}
        bound.model.eval()
        try:
            while True:
                answer = self._ask(WantTotals(self._place, ordinal, spec, self._epoch is None))
                match answer:
                    case TotalsAre():
                        return {name: result(total) for name, total in answer.totals.items()}
                    case EvalTask():
                        self._evaluate_task(answer, fn, data, ordinal)
        finally:
            self._close_batch()
            for module, training in modes.items():
                module.training = training

    def _evaluate_task(
        self, task: EvalTask, fn: Callable[[Any], Mapping[str, Any]], data: Dataset, ordinal: int
    ) -> None:
        ids = np.arange(task.start, task.stop)
        seed = self._mixed_seed("evaluate", self._place, ordinal, task.start)
        at = Version(task.generation, task.version)
        try:
            batch = self._enter(None, self._fetch(at, data, ids, seed, training=False))
            self._is_evaluating = True
            with torch.no_grad():
                totals = partials(fn(batch))
        except Void:
            return
        except (Exception, KeyboardInterrupt) as exc:
            failure = f"evaluate: {type(exc).__name__} on one of the trainers: {exc}"
            self._session.done = EvalDone(task.generation, task.attempt, {}, failure)
            raise
        finally:
            self._is_evaluating = False
        self._session.done = EvalDone(task.generation, task.attempt, totals)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Show metrics: inside `batches` of the present batch (means of the epoch are shown), else of the epoch."""
        if self._batch is not None:
            samples = self._batch.samples
            part = {name: mean([value], [float(samples)]) for name, value in numbers_of(metrics).items()}
            self._batch.metrics = added(self._batch.metrics, part)
            return
        numbers = numbers_of(metrics)
        best = self._checkpoints.score(numbers) if self._checkpoints else None
        self._session.driver.run(self._session.trainer.report(max(self._place, 0), numbers, best))
        if self._is_embedded:
            shown = "  ".join(f"{name} {value:.5g}" for name, value in numbers.items())
            where = f"epoch {self._place}" if self._epoch is not None else "outside the epochs"
            print(f"{where}: {shown}", flush=True)  # noqa: T201  # showing is what it is for

    def save_checkpoint(self) -> None:
        """Have a checkpoint made of the next step's parameters; returns at once.

        It does nothing where the job makes no checkpoints.
        """
        self._check_bound("save_checkpoint")
        self._session.driver.run(self._session.trainer.ask_checkpoint())

    def evict(self, table: str, ids: Tensor) -> None:
        """Have the rows of these ids deleted, with the update of the present batch and before it.

        Afterwards they read as ids never seen. A batch that contributes nothing evicts nothing.

        Args:
            table: a table's name.
            ids: int64 or int32, of any shape; ids without a row are passed over.
        Raises:
            ConfigError: outside `batches`, or there is no such table.
        """
        bound = self._check_bound("evict")
        if self._batch is None or self._batch.has_stepped:
            raise ConfigError("job.evict() belongs inside job.batches(), before the batch's optimizer.step()")
        self._batch.evict.append(bound.keys_of(table, ids))

    def is_leader(self) -> bool:
        """Whether this is the one trainer that at this moment does what only one should, as printing results."""
        return self._session.driver.run(self._session.trainer.is_leader())

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Save what inference needs to a folder; returns everywhere when the leader has written it.

        A model that is at `path` already is replaced once the new one is complete. No trainer or pserver holds a
        second copy of a table; pieces of some megabytes go through the leader.

        Raises:
            ConfigError: called inside `batches`, or the path cannot be written.
        """
        bound, target = self._check_bound("save_model", outside_batches=True), folder_of(path)
        ordinal = self._call("save_model")
        while True:
            answer = self._ask(WantSaved(self._place, ordinal, str(target), self._epoch is None))
            if isinstance(answer, Over):
                return
            if isinstance(answer, SaveTask):
                self._session.done = save(self._session, bound, answer, target, self._schema.seed)

    # -- the optimizer calls -------------------------------------------------------------------------------------------

    def on_step(self) -> None:
        """The optimizer's `step`: hand the batch's gradients to the pservers."""
        bound, batch = self._check_bound("optimizer.step"), self._batch
        if batch is None:
            raise ConfigError("optimizer.step() outside job.batches(); call it once for each batch, inside the loop")
        if batch.has_stepped:
            raise ConfigError(
                "optimizer.step() was called twice for one batch; to accumulate, raise batches_per_step or the batch"
                " size instead"
            )
        assert self._optimizer is not None
        batch.has_stepped = True
        update, task = self._schema.update, batch.task
        try:
            if self._local is not None:
                bound.step_locally(self._optimizer, batch.samples, batch.evict)
            elif isinstance(task, SyncTask):
                rows, spans = bound.contribution(self._optimizer)
                push = self._session.trainer.push(task, task.step, task.index, batch.samples, rows, spans, batch.evict)
                self._session.driver.run(push)
            else:
                rows, spans = bound.contribution(self._optimizer, update.push_every == 1, update.pull_every > 1)
                self._async.contribute(batch, rows, spans)
            batch.contributed = True
        except Void:
            batch.is_void = True
        except (NotFinite, PushRefused) as exc:
            self._warn(f"a batch was left out: {exc}", left_out=1)
            return
        if isinstance(task, SyncTask) and self._local is None:
            self._session.task = AtTask(task.generation, task.attempt, version=task.step + 1)

    def on_zero_grad(self) -> None:
        """The optimizer's `zero_grad`: rows forget their gradients too."""
        if self._bound is not None:
            self._bound.zero_grad()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ask(self, want: Want) -> Answer:
        """What to do next; hands in the initial values on the way if it falls to this trainer."""
        self._close_batch()
        self._session.task = None
        while True:
            answer = self._session.ask(want)
            if not isinstance(answer, InitTask):
                return answer
            self._session.done = self._hand_in_initial(answer)

    def _hand_in_initial(self, task: InitTask) -> TrainDone | None:
        bound = self._check_bound("init")
        try:
            push = self._session.trainer.push(task, INIT_STEP, 0, 1, [], bound.initial())
            self._session.driver.run(push)
        except Void:
            return None
        return TrainDone(task.generation, task.attempt, True, {})

    def _fetch(self, at: Version, data: Dataset, ids: NDArray[np.int64], seed: int, training: bool) -> Fetched:
        """Fetch a batch and ask for what it needs of the model."""
        return self._request(at, self._read(at, data, ids, seed, training), training=training)

    def _read(self, at: Version, data: Dataset, ids: NDArray[np.int64], seed: int, training: bool) -> Read:
        if not reads_anywhere(data):
            seed_generators(seed)
        batch = aligned(data.fetch(ids))
        return Read(batch, self._check_bound("batches").rows_of(at, batch, training), seed, ids.size)

    def _request(self, at: Version, read: Read, held: HeldRows | None = None, *, training: bool) -> Fetched:
        return Fetched(read, self._check_bound("batches").request(at, read.rows, training, held))

    def _enter(self, batch: "OpenBatch | None", fetched: Fetched) -> Any:
        """Put what a batch needs into the model; raises `Void` if the version has passed."""
        bound = self._check_bound("batches")
        assert self._optimizer is not None
        bound.enter(fetched.requested)
        if batch is not None:
            self._optimizer.at_step(batch.step)
        self._batch = batch
        seed_generators(fetched.read.seed + 1)
        return fetched.read.batch

    def _close_batch(self) -> None:
        self._batch = None
        if self._bound is not None:
            self._bound.close()

    def _call(self, what: str) -> int:
        """The number of this call of `what` at this place of the script."""
        number = self._calls[what, self._place]
        self._calls[what, self._place] += 1
        return number

    def _check_bound(self, what: str, outside_batches: bool = False) -> BoundModel:
        if self._bound is None:
            raise ConfigError(f"{what} needs a model: call job.optimizer(model, ...) first")
        if outside_batches and self._is_evaluating:
            raise ConfigError(f"job.{what}() inside the function given to job.evaluate(): call it after the evaluation")
        if outside_batches and self._batch is not None:
            raise ConfigError(f"job.{what}() inside job.batches(): call it between epochs, after the loop over batches")
        return self._bound

    def _mixed_seed(self, *parts: object) -> int:
        return mixed_seed(self._schema.seed, *parts)

    def _warn_if_no_step(self, batch: "OpenBatch") -> None:
        if not batch.has_stepped:
            self._warn(
                "optimizer.step() was not called for a batch, which so trains nothing; is it missing in the loop?"
            )

    def _warn(self, text: str, left_out: int = 0) -> None:
        """Say this once; what is left out is counted each time."""
        self._session.counters["left out (NaN or infinity, or refused)"] += left_out
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=frames_to_the_script())
