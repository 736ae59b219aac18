"""Does what a master has done for it: the record at once, storage in a thread, one errand after the other."""

import logging
import queue
import threading
from collections.abc import Callable

from evergrad.checkpoint.catalogue import choose, entries, good, split
from evergrad.checkpoint.manifest import Manifest, now, write_manifest
from evergrad.checkpoint.retention import remove, remove_interrupted
from evergrad.checkpoint.storage import Storage
from evergrad.errors import EvergradError, Unavailable
from evergrad.master.checkpoints import Durable
from evergrad.master.errands import Errand, Look, ManifestPut, Prune, Pruned, PutManifest, PutRecord, RecordPut, Result
from evergrad.master.record import Found, encode
from evergrad.messages import Progress, Source
from evergrad.store.file import FileStore

log = logging.getLogger("evergrad.master")

WAITING = 16
"""A master has fewer errands waiting than this: one manifest, one pruning, one look."""


class Clerk:
    """Runs errands; `results` are those done since it was last called.

    Args:
        store: where the record is kept, if it is.
    """

    def __init__(self, store: FileStore | None) -> None:
        self._store = store
        self._errands: queue.Queue[Errand | None] = queue.Queue(WAITING)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._again: PutRecord | None = None
        self._thread = threading.Thread(target=self._run, name="evergrad-storage", daemon=True)
        self._thread.start()

    def take(self, errand: Errand) -> None:
        """Do this, now or soon."""
        if isinstance(errand, PutRecord):
            self._put_record(errand)
        else:
            self._errands.put(errand)

    def results(self) -> list[Result]:
        """What has been done; a record that could not be written is tried again first."""
        if self._again is not None:
            self._put_record(self._again)
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """Do what was taken, and no more."""
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
        while (errand := self._errands.get()) is not None:
            self._results.put(done(errand))


def done(errand: Look | PutManifest | Prune | Errand) -> Result:
    """Do an errand of storage; what fails is said in the result."""
    match errand:
        case Look():
            try:
                return look(errand)
            except EvergradError as exc:
                return Found(failure=str(exc))
        case PutManifest():
            return ManifestPut(errand.complete.serial, _failure(lambda: _put(errand)))
        case Prune():
            return Pruned(_failure(lambda: _prune(errand)))
        case PutRecord():
            return RecordPut(errand.number)


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
    return Found(durable, found.next_serial, source, manifest.schema, progress)


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
        metrics=errand.reported,
    )
    with Storage(errand.url) as storage:
        write_manifest(storage, manifest)


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
