"""What the processes of a job have threads for, in simulated time: pieces to storage and back, the master's errands."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.manifest import read_manifest
from evergrad.checkpoint.pieces import Piece
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.storage import Storage
from evergrad.errors import EvergradError
from evergrad.master.clerk import done
from evergrad.master.errands import Errand, Held, Hold, PutManifest, PutRecord, RecordPut, Result
from evergrad.master.master import Master
from evergrad.master.record import encode
from evergrad.messages import Restore, Send
from evergrad.pserver.background import Facts, Finished, Saved, ToWrite

from .storage import Line, Store

if TYPE_CHECKING:
    from .processes import Process

LARGEST_TORN = 3


class Saver:
    """As `evergrad.pserver.background.Saver`. `turn` is called when there is something for the loop."""

    def __init__(self, process: "Process", store: Store, turn: Callable[[], None]) -> None:
        self.wanted: int | None = None
        self._process, self._store, self._turn = process, store, turn
        self.line = Line(self._begin)
        self._results: list[Saved] = []

    @property
    def has_room(self) -> bool:
        return not self.line.waiting

    def put(self, job: ToWrite) -> None:
        self.line.put(job)

    def results(self) -> list[Saved]:
        results, self._results = self._results, []
        return results

    def tear(self) -> None:
        """The process is killed."""
        if self.line.under_way is not None:
            self._store.shelf.tear(self.line.under_way.serial)

    def _begin(self, job: ToWrite) -> None:
        self._store.work(self._process, lambda: self._write(job), lambda: self.wanted == job.serial)

    def _write(self, job: ToWrite) -> None:
        if self.wanted == job.serial:
            try:
                files = write_piece(Storage(job.url), job.serial, job.schema, job.place, job.piece)
                self._results.append(Saved(job.serial, files))
            except EvergradError as exc:
                self._results.append(Saved(job.serial, failure=str(exc)))
        self.line.done()
        self._turn()


class Loader:
    """As `evergrad.pserver.background.Loader`."""

    def __init__(self, process: "Process", store: Store, turn: Callable[[], None], restore: Restore) -> None:
        self.restore = restore
        self._process, self._store, self._turn = process, store, turn
        self._is_wanted = True
        self._read: Facts | Piece | Finished | None = None
        self._items = self._all_items()
        self._go_on()

    def take(self) -> Facts | Piece | Finished | None:
        item, self._read = self._read, None
        if item is not None and not isinstance(item, Finished):
            self._go_on()
        return item

    def close(self) -> None:
        self._is_wanted = False
        self._items.close()

    def _go_on(self) -> None:
        self._store.work(self._process, self._step, lambda: self._is_wanted)

    def _step(self) -> None:
        if self._is_wanted:
            self._read = next(self._items)
            self._turn()

    def _all_items(self) -> Iterator[Facts | Piece | Finished]:
        restore, source = self.restore, self.restore.source
        try:
            storage = Storage(source.url)
            manifest = msgspec.structs.replace(read_manifest(storage, source.serial), schema=restore.schema)
            yield Facts(manifest.progress, manifest.updates)
            yield from pieces(storage, manifest, restore.place, restore.places)
            yield Finished()
        except EvergradError as exc:
            yield Finished(failure=str(exc))


class Clerk:
    """As `evergrad.master.clerk.Clerk`."""

    def __init__(self, process: "Process", store: Store, turn: Callable[[], None], rng: random.Random) -> None:
        self._process, self._store, self._turn, self._rng = process, store, turn, rng
        self.line = Line(self._begin)
        self._results: list[Result] = []
        self._again: PutRecord | None = None

    def run(self, master: Master, now_s: float) -> list[Send]:
        sends: list[Send] = []
        while True:
            for errand in master.take_errands():
                self._take(errand)
            if self._again is not None:
                self._put_record(self._again)
            results, self._results = self._results, []
            if not results:
                return sends
            for result in results:
                sends += master.done(result, now_s)

    def tear(self) -> None:
        """The process is killed: what is under way may be done, or half of it, and nobody hears of it."""
        errand = self.line.under_way
        if errand is not None and not isinstance(errand, Hold) and self._rng.random() < 0.5:
            with self._store.shelf.killing(after=self._rng.randint(0, LARGEST_TORN)), suppress(EvergradError):
                done(errand)
        if isinstance(errand, PutManifest):
            self._store.shelf.tear(errand.complete.serial)

    def _take(self, errand: Errand) -> None:
        if isinstance(errand, PutRecord):
            self._put_record(errand)
        else:
            self.line.put(errand)

    def _put_record(self, errand: PutRecord) -> None:
        if self._store.is_record_away:
            self._again = errand
            return
        self._store.record = encode(errand.record)
        self._again = None
        self._results.append(RecordPut(errand.number))

    def _begin(self, errand: Errand) -> None:
        self._store.work(self._process, lambda: self._do(errand))

    def _do(self, errand: Errand) -> None:
        self._results.append(Held() if isinstance(errand, Hold) else done(errand))
        self.line.done()
        self._turn()
