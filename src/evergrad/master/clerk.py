"""Does what a master has done for it, in threads, so that slow storage never holds up the master's loop."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from evergrad.checkpoint.catalogue import choose, entries, good, serials, split
from evergrad.checkpoint.claim import RENEW_S, Claim, claim
from evergrad.checkpoint.manifest import Manifest, now, write_manifest, write_metrics
from evergrad.checkpoint.retention import remove, remove_interrupted
from evergrad.checkpoint.storage import Storage
from evergrad.errors import ConfigError, EvergradError, Fenced, StorageError, Unavailable
from evergrad.master.checkpoints import Durable
from evergrad.master.errands import (
    Errand,
    Held,
    Hold,
    Look,
    ManifestPut,
    MetricsPut,
    Prune,
    Pruned,
    PutManifest,
    PutMetrics,
    PutRecord,
    RecordPut,
    Result,
)
from evergrad.master.master import Master
from evergrad.master.record import Found, encode
from evergrad.messages import Progress, Send, Source
from evergrad.store.file import FileStore

log = logging.getLogger("evergrad.master")

AT_ONCE_S = 0.02
"""A record is waited for so long: it is nearly always written by then, and its result need not wait for a tick."""
RETRY_S = 0.5
CLOSE_S = 5.0

E = TypeVar("E")


class Desk(Generic[E]):
    """A thread that does errands one after the other.

    A master has one errand of each kind under way at most, so few ever wait.

    Args:
        name: the thread's.
        work: does one.
        results: where what comes of it goes, or what it raised.
        done: called in the thread when there will be no more.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[E], Result],
        results: "queue.SimpleQueue[Result | BaseException]",
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._work, self._results, self._done = name, work, results, done
        self._errands: queue.SimpleQueue[E | None] = queue.SimpleQueue()
        self._given = self._finished = 0
        self._thread: threading.Thread | None = None

    def give(self, errand: E) -> None:
        """Have this done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._given += 1
        self._errands.put(errand)

    @property
    def is_busy(self) -> bool:
        """Whether something is not done yet."""
        return self._finished < self._given

    def close(self) -> None:
        """Do what was given, and no more; what takes long is left to itself."""
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        try:
            while (errand := self._errands.get()) is not None:
                self._results.put(self._work(errand))
                self._finished += 1
        except BaseException as exc:  # the loop raises it
            self._results.put(exc)
        finally:
            self._done()


class Clerk:
    """Runs errands: the record, what is read and written of checkpoints, and their removal, each in a thread.

    Args:
        store: where the record is kept, if it is.
    """

    def __init__(self, store: FileStore | None) -> None:
        self._store = store
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None
        self._claim: Claim | None = None
        self._record: Desk[PutRecord] = Desk("evergrad-record", self._put_record, self._results)
        self._storage: Desk[Hold | Look | PutManifest | PutMetrics] = Desk(
            "evergrad-storage", self._of_storage, self._results, self._release
        )
        self._tidy: Desk[Prune] = Desk("evergrad-tidy", done, self._results)

    @property
    def is_busy(self) -> bool:
        """Whether something is not done yet, or not told."""
        return not self._results.empty() or any(d.is_busy for d in (self._record, self._storage, self._tidy))

    def run(self, master: Master, now_s: float) -> list[Send]:
        """Take what a master wants done and tell it what is; returns what that has it send.

        Raises:
            BaseException: an error that nobody expected ended a thread.
        """
        sends: list[Send] = []
        while True:
            errands = master.take_errands()
            for errand in errands:
                self.take(errand)
            results = self.results(AT_ONCE_S if any(isinstance(e, PutRecord) for e in errands) else 0.0)
            if not results:
                return sends
            for result in results:
                sends += master.done(result, now_s)

    def take(self, errand: Errand) -> None:
        """Have this done soon."""
        match errand:
            case PutRecord():
                self._record.give(errand)
            case Prune():
                self._tidy.give(errand)
            case _:
                self._storage.give(errand)

    def results(self, wait_s: float = 0.0) -> list[Result]:
        """What has been done since the last call; waits so long for the first if there is none.

        Raises:
            BaseException: an error that nobody expected ended a thread.
        """
        results: list[Result] = []
        while True:
            try:
                result = self._results.get(timeout=wait_s) if wait_s > 0 else self._results.get_nowait()
            except queue.Empty:
                return results
            if isinstance(result, BaseException):
                raise result
            results.append(result)
            wait_s = 0.0

    def close(self) -> None:
        """Do what was taken, and no more."""
        self._closing.set()
        for desk in (self._record, self._tidy, self._storage):
            desk.close()

    # -- the record ----------------------------------------------------------------------------------------------------

    def _put_record(self, errand: PutRecord) -> RecordPut:
        """Write it, however often that takes."""
        is_told = False
        while True:
            try:
                if self._store is not None:
                    self._store.write(encode(errand.record))
                return RecordPut(errand.number)
            except Unavailable as exc:
                if not is_told:
                    log.warning("record.unwritten reason=%s", exc)
                is_told = True
            if self._closing.wait(RETRY_S):
                return RecordPut(errand.number)  # nobody listens any more

    # -- the place of checkpoints --------------------------------------------------------------------------------------

    def _of_storage(self, errand: Hold | Look | PutManifest | PutMetrics) -> Result:
        return self._hold(errand) if isinstance(errand, Hold) else done(errand)

    def _hold(self, errand: Hold) -> Held:
        failure = None
        try:
            taken = claim(errand.url, errand.job)
            taken.take()
        except StorageError as exc:
            failure = str(exc)  # tried again whenever it is to be renewed
        except EvergradError as exc:
            return Held(str(exc), is_other=True)
        self._claim = taken
        self._keeper = threading.Thread(target=self._keep, args=(taken,), name="evergrad-claim", daemon=True)
        self._keeper.start()
        return Held(failure)

    def _keep(self, taken: Claim) -> None:
        """Hold on to the place, whatever else takes long."""
        while not self._closing.wait(RENEW_S):
            try:
                taken.renew()
            except Fenced as exc:
                self._results.put(Held(str(exc), is_other=True))
                return
            except EvergradError as exc:
                log.warning("claim.unrenewed reason=%s", exc)

    def _release(self) -> None:
        """No more is written: let others have the place."""
        if self._keeper is not None and self._claim is not None:
            self._keeper.join(timeout=CLOSE_S)
            self._claim.release()


def done(errand: Look | PutManifest | PutMetrics | Prune) -> Result:
    """Do an errand of storage; what fails is said in the result."""
    match errand:
        case Look():
            try:
                return look(errand)
            except EvergradError as exc:
                return Found(failure=str(exc))
        case PutManifest():
            return ManifestPut(errand.complete.serial, _failure(lambda: _put(errand)))
        case PutMetrics():
            return MetricsPut(errand.serial, _failure(lambda: _put_metrics(errand)))
        case Prune():
            return Pruned(_failure(lambda: _prune(errand)))


def look(errand: Look) -> Found:
    """What there is to begin with; raises what storage does."""
    found = Found()
    if errand.url is not None:
        with Storage(errand.url) as storage:
            there = entries(storage)
            next_serial = max(serials(storage), default=-1) + 1
        manifests = [e.manifest for e in there if e.manifest is not None]
        newest = max((m.serial for m in manifests), default=-1)
        newer = [e for e in there if e.serial > newest and not e.is_interrupted]
        found = Found(next_serial=next_serial, damaged=tuple(f"checkpoint {e.serial}: {e.problem}" for e in newer))
        if errand.resume == "auto" and newer and not manifests:
            raise ConfigError(
                f"no checkpoint in {errand.url} can be used: {found.damaged[-1]}; begin anew in another place"
            )
        if errand.resume == "auto" and manifests:
            ours = [m for m in manifests if m.lineage == manifests[-1].lineage]
            durable = tuple(Durable(m.serial, m.progress, m.best) for m in ours)
            return _beginning(found, Source(errand.url, newest), manifests[-1], durable)
    if errand.resume not in ("auto", "never"):
        url, manifest = _chosen(errand.resume)
        return _beginning(found, Source(url, manifest.serial), manifest)
    if errand.warm_start is not None:
        url, manifest = _chosen(errand.warm_start)
        return _beginning(found, Source(url, manifest.serial, warm=True), manifest)
    return found


def _beginning(found: Found, source: Source, manifest: Manifest, durable: tuple[Durable, ...] = ()) -> Found:
    progress = Progress() if source.warm else manifest.progress
    found = msgspec.structs.replace(found, durable=durable, source=source, schema=manifest.schema, progress=progress)
    if source.warm:
        return found
    done = {"evaluations": manifest.evaluations, "savings": manifest.savings, "reported": manifest.metrics}
    return msgspec.structs.replace(found, lineage=manifest.lineage, **done)


def _chosen(url: str) -> tuple[str, Manifest]:
    """The checkpoint that a user names, and where it lies."""
    root, name = split(url)
    with Storage(root) as storage:
        return root, good(storage, choose(storage, name))


def _put(errand: PutManifest) -> None:
    complete = errand.complete
    manifest = Manifest(
        job=errand.job,
        lineage=errand.lineage,
        serial=complete.serial,
        created=now(),
        places=errand.places,
        generation=errand.generation,
        schema=errand.schema,
        progress=complete.progress,
        updates=complete.updates,
        files=complete.files,
        evaluations=complete.calls[0],
        savings=complete.calls[1],
        metrics=errand.reported,
    )
    with Storage(errand.url) as storage:
        write_manifest(storage, manifest)


def _put_metrics(errand: PutMetrics) -> None:
    with Storage(errand.url) as storage:
        write_metrics(storage, errand.serial, errand.metrics)


def _prune(errand: Prune) -> None:
    with Storage(errand.url) as storage:
        for serial in errand.remove:
            remove(storage, serial)
        remove_interrupted(storage, errand.before)


def _failure(work: Callable[[], None]) -> str | None:
    try:
        work()
    except EvergradError as exc:
        return str(exc)
    return None
