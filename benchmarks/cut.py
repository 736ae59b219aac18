"""What a checkpoint in progress costs a pserver: its updates, its memory, and how long it takes.

A pserver of one table with Adagrad is asked without a pause, as fast as it answers: the worst case, since in a job
slices of the cut are copied while trainers compute. A batch is a pull and a push of the same rows. `python
benchmarks/cut.py --rows 20000000` shows all for another size. Times of batches are seconds of processor time of the
pserver's thread, which waiting for a processor does not lengthen, and slices are paced by the same; the writing thread
works beside it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import numpy as np
from tables import Figure, at_least, at_most, bound

import evergrad as eg
from evergrad.checkpoint.manifest import Manifest, now, write_manifest
from evergrad.checkpoint.storage import Storage
from evergrad.kernels.warm import warm
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Commit,
    Generation,
    Mark,
    Member,
    Place,
    Progress,
    Pull,
    PushBatch,
    Request,
    Restore,
    Schema,
    Source,
    TableGrads,
    TableKeys,
    TableSpec,
    Term,
    UpdateName,
    UpdateSpec,
    Written,
    WrittenNoted,
)
from evergrad.pserver.background import Saver
from evergrad.pserver.between import QUIET_S, Between
from evergrad.pserver.pserver import Pserver

ROWS, DIM, KEYS, SETS = 5_000_000, 16, 20_000, 200
ROW_BYTES = 8 * DIM
PUSHES, CUTS, FLAT = 1500, 3, 20
SCHEMA = Schema(
    0, UpdateSpec(UpdateName.ASYNC, 1), (TableSpec("user", DIM, eg.Adagrad().spec(), eg.init_rows.zeros()),), ()
)
FOLDER = Path(os.environ.get("EVERGRAD_BENCH_DIR", tempfile.gettempdir()))
TERM, GENERATION = Term(1), Generation(1)


class Loop:
    """A pserver's loop, without sockets."""

    def __init__(self, url: str, rows: int, generation: Generation = GENERATION, source: Source | None = None) -> None:
        self.pserver = Pserver(Member("p"))
        self.between = Between(self.pserver, Saver(), clock=time.thread_time, processors=2)
        self.written: Written | None = None
        self._pushes, self._serial, self._generation = 0, 0, generation
        told = Restore(TERM, generation, self.pserver.member, Place(0), 1, SCHEMA, source, url)
        self.pserver.handle("master", told)
        rng = np.random.default_rng(0)
        keys = rng.integers(-(2**63), 2**63, rows, np.int64)
        if source is None:
            self.pserver.handle("master", Commit(TERM, generation, INIT_STEP, (), None))
            for part in np.array_split(keys, max(1, rows // 50_000)):
                self.push(part, np.zeros((part.size, DIM), np.float32))
        self.sets = [keys[rng.choice(rows, min(KEYS, rows // 5), replace=False)] for _ in range(SETS)]
        self.grads = rng.standard_normal((min(KEYS, rows // 5), DIM), dtype=np.float32)

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        """One update."""
        table = (TableGrads(0, 0.01, keys, grads),)
        push = PushBatch(Request(1), self._generation, 0, 0, self._pushes, table, ())
        assert self.pserver.handle("trainer", push)
        self._pushes += 1

    def turn(self, number: int | None) -> float:
        """Serve a batch, unless `number` is None, and do what is to be done after it; returns the seconds it takes."""
        began = time.thread_time()
        if number is not None:
            keys = self.sets[number % len(self.sets)]
            self.between.asked(time.thread_time())
            pull = Pull(Request(1), self._generation, NEWEST, False, (TableKeys(0, keys),), ())
            assert self.pserver.handle("trainer", pull)
            self.push(keys, self.grads)
        sends, wait_s = self.between.work(time.thread_time())
        took = time.thread_time() - began
        for send in sends:
            if isinstance(send.message, Written):
                self.written = send.message
                self.pserver.handle("master", WrittenNoted(TERM, send.message.serial))
        if number is None:
            time.sleep(min(wait_s or 0.0, 0.005))
        return took

    def mark(self) -> float:
        """Begin a cut; returns the seconds that takes."""
        self._serial += 1
        standing = ((0, self._pushes),)
        began = time.thread_time()
        self.pserver.handle("master", Mark(TERM, self._generation, self._serial, 0, 0, standing))
        return time.thread_time() - began

    def finish(self) -> Written:
        """Save the cut with nothing else to do."""
        self.between.asked(-QUIET_S)
        while self.pserver.saving is not None:
            self.turn(None)
        while self.pserver.release():
            pass
        assert self.written is not None
        assert self.written.failure is None
        return self.written


def figures(quick: bool) -> Iterator[Figure]:
    """All figures, and the first of them for four times the rows."""
    rows = 200_000 if quick else ROWS
    yield from cuts(rows, 300 if quick else PUSHES, CUTS)
    yield from cuts(4 * rows, 300 if quick else PUSHES, 1)
    yield from flat(rows)


def cuts(rows: int, pushes: int, turns: int) -> Iterator[Figure]:
    """Batches with a cut always in progress beside batches without any, and the memory it takes."""
    with tempfile.TemporaryDirectory(prefix="evergrad-bench-", dir=FOLDER) as folder:
        loop = Loop(folder, rows)
        loop.mark()  # once unmeasured: memory that the system has never given to anybody takes longer to get
        for number in range(SETS):
            loop.push(loop.sets[number], loop.grads)
        loop.finish()
        begins, plain, during, most, touched = [], [], [], [], 0
        for _ in range(turns):
            plain += [loop.turn(number) for number in range(pushes)]
            before = _resident_bytes()
            begins.append(loop.mark())
            first, peak = len(during), 0
            while loop.pserver.saving is not None:
                during.append(loop.turn(len(during)))
                peak = max(peak, _resident_bytes()) if len(during) % 10 == 0 else peak
            most.append(peak - before)
            touched = _different(loop, range(first, len(during)))
        share = float(np.mean(plain)) / float(np.mean(during))
        about = f"{rows:,} rows x ({DIM} + {DIM})"
        yield at_least(f"batches/s with a cut in progress / without, {about}", share, "x", 0.95)
        median = float(np.median(plain))
        yield at_most(f"slowest batch in a cut / median batch, {about}", max(during) / median, "x", 3.0)
        yield bound(f"slowest batch without a cut / median batch, {about}", max(plain) / median, "x")
        yield at_most(f"beginning a cut, {about}", max(begins) * 1e3, "ms", 5.0)
        yield at_most(f"memory in a cut beyond rows touched, {about}", max(most) / 1e6 - touched / 1e6, "MB", 64.0)
        yield bound(f"rows touched in that cut, {about}", touched / 1e6, "MB")
        yield bound(f"batches of {loop.grads.shape[0]:,} keys during a cut, {about}", len(during) / turns, "batches")
        yield from _storing(loop, folder, rows)
        loop.between.close()


def flat(rows: int) -> Iterator[Figure]:
    """Memory after many cuts."""
    with tempfile.TemporaryDirectory(prefix="evergrad-bench-", dir=FOLDER) as folder:
        loop = Loop(folder, rows)
        resident = []
        for number in range(FLAT + 2):
            loop.mark()
            for push in range(20):
                loop.turn(push + number)
            loop.finish()
            _clear(folder)
            resident.append(_resident_bytes())
        loop.between.close()
        yield at_most(f"memory after {FLAT} cuts, more than after two", (resident[-1] - resident[1]) / 1e6, "MB", 16.0)


def _storing(loop: Loop, folder: str, rows: int) -> Iterator[Figure]:
    """A whole save and a whole load, nothing else being done, beside writing and reading the bytes of the files."""
    _clear(folder)
    began = time.perf_counter()
    loop.mark()
    written = loop.finish()
    save_s = time.perf_counter() - began
    files = sorted(Path(folder).rglob("*.safetensors"))
    contents = [file.read_bytes() for file in files]
    began = time.perf_counter()
    with (Path(folder) / "plain").open("wb", buffering=0) as plain:
        for content in contents:
            plain.write(content)
        os.fsync(plain.fileno())
    write_s = time.perf_counter() - began
    size = sum(map(len, contents))
    del contents
    about = f"{rows:,} rows, {size / 1e6:,.0f} MB"
    yield at_least(f"rate of a save / of a plain write, {about}", write_s / save_s, "x", 0.5)
    manifest = Manifest(
        job="bench", lineage="bench", serial=written.serial, created=now(), places=1, generation=1, schema=SCHEMA,
        progress=Progress(epoch=0), updates=written.updates, files=written.files,
    )  # fmt: skip
    with Storage(folder) as storage:
        write_manifest(storage, manifest)
    for where, is_cold in (("out of", True), ("in", False)):
        ratios = []
        for _ in range(2):  # the first for the same reason as above
            if is_cold:
                checkpoints.push_out(files)
            began = time.perf_counter()
            kept = [file.read_bytes() for file in files]
            read_s = time.perf_counter() - began
            del kept
            if is_cold:
                checkpoints.push_out(files)
            again = Loop(folder, rows, Generation(2), Source(folder, written.serial))
            began = time.perf_counter()
            while again.pserver.loading is not None:
                again.turn(None)
            ratios.append(read_s / (time.perf_counter() - began))
            again.between.close()
            assert again.pserver.restored is not None
            del again
        yield at_least(f"rate of a load / of a plain read, {where} the page cache, {about}", ratios[-1], "x", 0.4)


def _different(loop: Loop, pushes: range) -> int:
    """Bytes of the different rows that these pushes touch."""
    sets = {number % len(loop.sets) for number in pushes}
    return ROW_BYTES * int(np.unique(np.concatenate([loop.sets[number] for number in sets])).size)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _clear(folder: str) -> None:
    for file in Path(folder).rglob("*"):
        if file.is_file():
            file.unlink()


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(description="Measure what a checkpoint in progress costs a pserver.")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the table")
    parser.add_argument("--flat", action="store_true", help="memory after many cuts only")
    options = parser.parse_args()
    warm()
    for figure in flat(options.rows) if options.flat else cuts(options.rows, PUSHES, CUTS):
        print(json.dumps(figure), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
