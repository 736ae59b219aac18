"""Does what a master has done for it: the record at once, storage in a thread, one errand after the other."""

import logging
import queue
import threading
from collections.abc import Callable

import msgspec

from evergrad.checkpoint.catalogue import choose, entries, good, split
from evergrad.checkpoint.claim import RENEW_S, Claim, claim
from evergrad.checkpoint.manifest import Manifest, now, write_manifest, write_metrics
from evergrad.checkpoint.retention import remove, remove_interrupted
from evergrad.checkpoint.storage import Storage
from evergrad.errors import EvergradError, Fenced, StorageError, Unavailable
from evergrad.master.checkpoints import Durable
from evergrad.master.errands import (
    Errand,
    Held,
    Hold,
    Look,
    ManifestPut,
    MetricsPut,
    OfStorage,
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

WAITING = 16
"""A master has fewer errands waiting than this: one of each kind but record."""


class Clerk:
    """Runs errands; `results` are those done since it was last called.

    Args:
        store: where the record is kept, if it is.
    """

    def __init__(self, store: FileStore | None) -> None:
        self._store = store
        self._errands: queue.Queue[OfStorage | None] = queue.Queue(WAITING)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._again: PutRecord | None = None
        self._claim: Claim | None = None
        self._open = 0
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something of storage is not done yet."""
        return self._open > 0

    def run(self, master: Master, now_s: float) -> list[Send]:
        """Take what a master wants done and tell it what is; returns what that has it send."""
        sends: list[Send] = []
        while True:
            for errand in master.take_errands():
                self.take(errand)
            results = self.results()
            if not results:
                return sends
            for result in results:
                sends += master.done(result, now_s)

    def take(self, errand: Errand) -> None:
        """Do this, now or soon."""
        if isinstance(errand, PutRecord):
            self._put_record(errand)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evergrad-storage", daemon=True)
            self._thread.start()
        self._open += 1
        self._errands.put(errand)

    def results(self) -> list[Result]:
        """What has been done; a record that could not be written is tried again first."""
        if self._again is not None:
            self._put_record(self._again)
        results = []
        while not self._results.empty():
            results.append(self._results.get())
            self._open -= not isinstance(results[-1], RecordPut)
        return results

    def close(self) -> None:
        """Do what was taken, and no more."""
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join(timeout=5.0)

    def _put_record(self, errand: PutRecord) -> None:
        try:
            if self._store is not None:
                self._store.write(encode(errand.record))
        except Unavailable as exc:
            if self._again is None:
                log.warning("record.unwritten reason=%s", exc)
            self._again = errand
            return
        self._again = None
        self._results.put(RecordPut(errand.number))

    def _run(self) -> None:
        try:
            while (errand := self._next()) is not None:
                self._results.put(self._hold(errand) if isinstance(errand, Hold) else done(errand))
        finally:
            if self._claim is not None:
                self._claim.release()

    def _next(self) -> OfStorage | None:
        """The next errand; None: no more. Meanwhile the place of checkpoints is held on to."""
        while True:
            try:
                return self._errands.get(timeout=None if self._claim is None else RENEW_S)
            except queue.Empty:
                self._renew()

    def _hold(self, errand: Hold) -> Held:
        try:
            self._claim = claim(errand.url, errand.job)
            self._claim.take()
        except StorageError as exc:
            return Held(str(exc))
        except EvergradError as exc:
            return Held(str(exc), is_other=True)
        return Held()

    def _renew(self) -> None:
        assert self._claim is not None
        try:
            self._claim.renew()
        except Fenced as exc:
            self._claim = None
            self._results.put(Held(str(exc), is_other=True))
        except EvergradError as exc:
            log.warning("claim.unrenewed reason=%s", exc)


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
        next_serial = max((e.serial for e in there), default=-1) + 1
        manifests = [e.manifest for e in there if e.manifest is not None]
        found = Found(next_serial=next_serial)
        if errand.resume == "auto" and manifests:
            durable = tuple(Durable(m.serial, m.progress, m.best) for m in manifests)
            return _beginning(found, Source(errand.url, manifests[-1].serial), manifests[-1], durable)
    if errand.resume not in ("auto", "never"):
        url, manifest = _chosen(errand.resume)
        return _beginning(found, Source(url, manifest.serial), manifest)
    if errand.warm_start is not None:
        url, manifest = _chosen(errand.warm_start)
        return _beginning(found, Source(url, manifest.serial, warm=True), manifest)
    return found


def _beginning(found: Found, source: Source, manifest: Manifest, durable: tuple[Durable, ...] = ()) -> Found:
    progress = Progress() if source.warm else manifest.progress
    found = Found(durable, found.next_serial, source, manifest.schema, progress)
    if source.warm:
        return found
    done = {"evaluations": manifest.evaluations, "savings": manifest.savings, "reported": manifest.metrics}
    return msgspec.structs.replace(found, **done)


def _chosen(url: str) -> tuple[str, Manifest]:
    """The checkpoint that a user names, and where it lies."""
    root, name = split(url)
    with Storage(root) as storage:
        return root, good(storage, choose(storage, name))


def _put(errand: PutManifest) -> None:
    complete = errand.complete
    manifest = Manifest(
        job=errand.job,
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
