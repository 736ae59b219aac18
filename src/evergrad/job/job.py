"""`eg.init` and the `Job` it returns: what a training script calls."""

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import ref

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evergrad.checkpoint.model import new_model
from evergrad.checks import whole_number
from evergrad.data.dataset import Dataset, reads_anywhere
from evergrad.data.order import epoch_order
from evergrad.errors import ConfigError, EvergradError
from evergrad.heap import keep_freed_memory
from evergrad.job.ahead import Ahead, Reader
from evergrad.job.alignment import aligned
from evergrad.job.arguments import added, data_of, folder_of, frames_to_the_script, numbers_of, partials, seed_of
from evergrad.job.batch import Fetched, OpenBatch, Read, seed_generators
from evergrad.job.bound import BoundModel, Version
from evergrad.job.dense import NotFinite, Rules
from evergrad.job.embedded import MASTER as LOCAL_MASTER
from evergrad.job.embedded import LocalNetwork
from evergrad.job.numerics import fingerprint
from evergrad.job.optimizer import JobOptimizer
from evergrad.job.saving import save_tables
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    AsyncTask,
    BreakDone,
    DataSpec,
    Done,
    EpochIs,
    EvalDone,
    EvalTask,
    InitTask,
    Member,
    Over,
    Partial,
    SaveDone,
    SaveTask,
    Schema,
    SyncTask,
    TableKeys,
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
from evergrad.trainer import session as sessions
from evergrad.trainer.cutting import MESSAGE_BYTES
from evergrad.trainer.driver import Driver
from evergrad.trainer.exchange import Exchange, Flow
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import Answer, Identity, PushRefused, RowGrads, SpanGrads, Trainer, Void
from evergrad.update import Async, Sync, Update

Batches = Generator[Any, None, None]


def init(update: Update | None = None, *, seed: int = 0, threads: int = 1, wire: str = "float32") -> "Job":
    """Take part in a job: the one that `evergrad run` started this process for, else one inside this process.

    Random generators of Python, numpy and torch are seeded, so that every trainer makes the same model.

    Args:
        update: the update rule; `Sync()` if not given.
        seed: the job's seed, from which all its random numbers follow; `evergrad run --seed` goes before it.
        threads: how many threads torch computes with, the same however the job is started.
        wire: what rows and their gradients are on the wire: "float32", or "bfloat16" or "float16" for half the bytes;
            the pservers keep and update float32.

    Raises:
        ConfigError: an argument that makes no sense, or the job refuses this process.
    """
    if not isinstance(update, Update | None):
        raise ConfigError(f"update is {update!r}; give eg.Sync(...) or eg.Async(...)")
    spec = (Sync() if update is None else update).spec()
    seed = seed_of(os.environ.get(sessions.SEED, seed))
    threads = whole_number("threads", threads, least=1)
    if wire not in list(Wire):
        raise ConfigError(f"wire is {wire!r}; give one of {', '.join(Wire)}")
    torch.set_num_threads(threads)
    keep_freed_memory()
    is_embedded = sessions.MASTER not in os.environ
    session = embedded_session() if is_embedded else sessions.connect(os.environ, fingerprint())
    seed_generators(seed)
    is_ahead = isinstance(update, Async) and update.ahead
    return Job(session, Schema(seed, spec, (), (), Wire(wire)), is_embedded, is_ahead)


def embedded_session(pservers: int = 1, message_bytes: int = MESSAGE_BYTES) -> Session:
    """A job inside this process with so many pservers, its one trainer, and messages of about this size at most."""
    exchange, network = Exchange(), LocalNetwork(pservers)
    identity = Identity("trainer-0", os.getpid(), "")
    trainer = Trainer(exchange, LOCAL_MASTER, identity, lambda: Member("trainer-0"), message_bytes)
    driver = Driver(exchange, network)
    driver.run(trainer.join())
    return Session(trainer, driver)


class Job:
    """A training run as this process sees it. Made by `init`.

    Everything that waits for other processes waits as long as it takes; what happens to them never raises here. When
    the job ends elsewhere, the script is left by a `SystemExit`.
    """

    def __init__(self, session: Session, schema: Schema, is_embedded: bool, is_ahead: bool = False) -> None:
        self._session = session
        self._schema = schema
        self._is_embedded, self._is_ahead = is_embedded, is_ahead
        self._bound: BoundModel | None = None
        self._optimizer: JobOptimizer | None = None
        self._until = 0
        self._place = -1
        self._epoch: int | None = None
        self._trained_epoch: int | None = None
        self._calls: Counter[tuple[str, int]] = Counter()
        self._done: Done | None = None
        self._batch: OpenBatch | None = None
        self._is_evaluating = False
        self._pushing: tuple[AsyncTask, int, Flow[None]] | None = None
        self._loop: Callable[[], Batches | None] = lambda: None
        self._warned: set[str] = set()

    # -- the model -----------------------------------------------------------------------------------------------------

    def optimizer(self, model: nn.Module, *, dense: Rules | None = None, sparse: Rules | None = None) -> JobOptimizer:
        """Bind the job's model; returns a `torch.optim.Optimizer` whose steps are taken on the pservers.

        Args:
            model: any torch model; its `eg.Embedding` and `eg.EmbeddingBag` modules are the tables.
            dense: the rule for parameters, or rules by pattern of parameter names (the first that fits counts).
            sparse: the rule for tables, or rules by table name or pattern; a table's own `optimizer=` goes before it.

        Raises:
            ConfigError: a parameter or table without a rule, or the other trainers have another model.
        """
        if self._bound is not None:
            raise ConfigError(
                "job.optimizer() was called twice; a job trains one model, so put its parts into one module"
            )
        bound = BoundModel(self._session, model, dense, sparse, self._schema.wire)
        optimizer = JobOptimizer(self, bound.groups, bound.table_rules())
        groups = tuple(group.spec for group in bound.groups)
        rates = optimizer.fixed_rates()
        schema = msgspec.structs.replace(self._schema, tables=bound.tables, groups=groups, rates=rates)
        self._session.driver.run(self._session.trainer.agree(schema, bound.initial_digest()))
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
            last = self._done.last if isinstance(self._done, BreakDone) else None
            self._done = BreakDone(epoch, self._until, last)
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
        reader = Reader()
        try:
            while True:
                task = self._ask(WantBatch(epoch, spec))
                match task:
                    case SyncTask():
                        yield from self._sync_task(task, data, spec, shuffle)
                    case AsyncTask():
                        yield from self._async_task(task, data, spec, shuffle, reader)
                    case Over():
                        return
        except BaseException:
            self._done = BreakDone(epoch, 0, self._done if isinstance(self._done, TrainDone) else None)
            raise
        finally:
            reader.close()
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
                self._done = TrainDone(task.generation, task.attempt, batch.contributed, batch.metrics)

    def _async_task(self, task: AsyncTask, data: Dataset, spec: DataSpec, shuffle: bool, reader: Reader) -> Batches:
        ids = epoch_order(spec.samples, self._schema.seed, task.epoch, np.arange(task.start, task.stop), shuffle)
        count = -(-ids.size // spec.batch_size)
        metrics: dict[str, Partial] = {}

        at = Version(task.generation, NEWEST)

        def read(number: int) -> Read:
            part = ids[number * spec.batch_size : (number + 1) * spec.batch_size]
            seed = self._mixed_seed("task", task.epoch, task.first + number, 0)
            return self._read(at, data, part, seed, training=True)

        def fetch(number: int) -> Fetched:
            return self._request(at, reading.take(number), training=True)

        reading = Ahead(read, count, reader if self._is_ahead and reads_anywhere(data) else None)
        ahead: Fetched | None = None
        try:
            for number in range(self._session.driver.run(self._session.trainer.where(task)), count):
                fetched = ahead or fetch(number)
                ahead = fetch(number + 1) if self._is_ahead and number + 1 < count else None
                batch = OpenBatch(task, task.first + number, fetched.read.samples, number)
                opened = self._enter(batch, fetched)
                reading.start(number + 2)
                yield opened
                self._warn_if_no_step(batch)
                if not batch.contributed:
                    self._push_batch(task, number)
                if ahead is None:
                    self._finish_push()
                metrics = added(metrics, batch.metrics)
        except GeneratorExit:
            with suppress(Void):
                self._finish_push()
            raise
        except Void:
            return
        finally:
            self._pushing = None
        self._done = TrainDone(task.generation, task.attempt, True, metrics)

    def _push_batch(
        self,
        task: AsyncTask,
        number: int,
        rows: Sequence[RowGrads] = (),
        spans: Sequence[SpanGrads] = (),
        evict: Sequence[TableKeys] = (),
    ) -> None:
        """Start to push a batch, once the one before is applied."""
        self._finish_push()
        flow = self._session.driver.start(self._session.trainer.push_batch(task, number, rows, spans, evict))
        self._pushing = task, number, flow

    def _finish_push(self) -> None:
        """Wait until the batch on its way is applied; one that is refused counts as done with nothing in it."""
        while self._pushing is not None:
            (task, number, flow), self._pushing = self._pushing, None
            try:
                self._session.driver.run(flow)
            except PushRefused as exc:
                self._warn(f"a batch was left out: {exc}")
                self._push_batch(task, number)

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
            raise ConfigError(
                f"evaluate: {fn!r} is no function; give one that takes a batch and returns metrics by name"
            )
        data, spec = data_of(dataset, batch_size, shuffle=False)
        ordinal = self._call("evaluate")
        modes = {module: module.training for module in bound.model.modules()}
        bound.model.eval()
        try:
            while True:
                answer = self._ask(WantTotals(self._place, ordinal, spec))
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
            self._done = EvalDone(task.generation, task.attempt, {}, failure)
            raise
        finally:
            self._is_evaluating = False
        self._done = EvalDone(task.generation, task.attempt, totals)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Show metrics: inside `batches` of the present batch (means of the epoch are shown), else of the epoch."""
        if self._batch is not None:
            samples = self._batch.samples
            part = {name: mean([value], [float(samples)]) for name, value in numbers_of(metrics).items()}
            self._batch.metrics = added(self._batch.metrics, part)
            return
        numbers = numbers_of(metrics)
        self._session.driver.run(self._session.trainer.report(max(self._place, 0), numbers))
        if self._is_embedded:
            shown = "  ".join(f"{name} {value:.5g}" for name, value in numbers.items())
            where = f"epoch {self._place}" if self._epoch is not None else "outside the epochs"
            print(f"{where}: {shown}", flush=True)  # noqa: T201  # showing is what it is for

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
        self._check_bound("save_model", outside_batches=True)
        target = folder_of(path)
        ordinal = self._call("save_model")
        while True:
            answer = self._ask(WantSaved(self._place, ordinal, str(target)))
            if isinstance(answer, Over):
                return
            if isinstance(answer, SaveTask):
                self._done = self._save(answer, target)

    def _save(self, task: SaveTask, path: Path) -> SaveDone | None:
        """Save; returns what to report, or None if it falls to another trainer."""
        bound = self._check_bound("save_model")
        at = Version(task.generation, task.version)
        try:
            with new_model(path, self._schema.seed) as writer:
                writer.dense(lambda file: bound.save_dense(file, at))
                save_tables(self._session, task, bound.tables, writer)
                if not self.is_leader():  # frozen meanwhile, and another one has saved, or will
                    raise Void(task.generation)
        except EvergradError as exc:
            return SaveDone(task.generation, task.attempt, f"save_model: {exc}")
        except Void:
            return None
        return SaveDone(task.generation, task.attempt)

    # -- the optimizer calls -------------------------------------------------------------------------------------------

    def on_step(self) -> None:
        """The optimizer's `step`: hand the batch's gradients to the pservers."""
        bound, batch = self._check_bound("optimizer.step"), self._batch
        if batch is None:
            raise ConfigError("optimizer.step() outside job.batches(); call it once for each batch, inside the loop")
        if batch.has_stepped:
            raise ConfigError(
                "optimizer.step() was called twice for one batch; to accumulate, raise batches_per_step instead"
            )
        assert self._optimizer is not None
        batch.has_stepped = True
        try:
            rows, spans = bound.contribution(self._optimizer)
            task, trainer = batch.task, self._session.trainer
            if isinstance(task, SyncTask):
                push = trainer.push(task, task.step, task.index, batch.samples, rows, spans, batch.evict)
                self._session.driver.run(push)
            else:
                self._push_batch(task, batch.number, rows, spans, batch.evict)
            batch.contributed = True
        except Void:
            batch.is_void = True
        except (NotFinite, PushRefused) as exc:
            self._warn(f"a batch was left out: {exc}")

    def on_zero_grad(self) -> None:
        """The optimizer's `zero_grad`: rows forget their gradients too."""
        if self._bound is not None:
            self._bound.zero_grad()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ask(self, want: Want) -> Answer:
        """What to do next; hands in the initial values on the way if it falls to this trainer."""
        self._close_batch()
        while True:
            done, self._done = self._done, None
            answer = self._session.driver.run(self._session.trainer.ask(want, done))
            if not isinstance(answer, InitTask):
                return answer
            self._done = self._hand_in_initial(answer)

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
        return self._request(at, self._read(at, data, ids, seed, training), training)

    def _read(self, at: Version, data: Dataset, ids: NDArray[np.int64], seed: int, training: bool) -> Read:
        if not reads_anywhere(data):
            seed_generators(seed)
        batch = aligned(data.fetch(ids))
        return Read(batch, self._check_bound("batches").rows_of(at, batch, training), seed, ids.size)

    def _request(self, at: Version, read: Read, training: bool) -> Fetched:
        return Fetched(read, self._check_bound("batches").request(at, read.rows, training))

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
        """A seed made of the job's and of what it is for, the same in every process."""
        text = repr((self._schema.seed, *parts)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def _warn_if_no_step(self, batch: "OpenBatch") -> None:
        if not batch.has_stepped:
            self._warn(
                "optimizer.step() was not called for a batch, which so trains nothing; is it missing in the loop?"
            )

    def _warn(self, text: str) -> None:
        """Say this once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=frames_to_the_script())
