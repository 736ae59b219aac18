"""What checkpoints cost beside writing and reading the same bytes plainly: one table with Adagrad.

Both sides of a ratio are measured in turns, in seconds that pass, since a disk is what is measured; the median counts.
What is read was pushed out of the page cache before. `python benchmarks/checkpoints.py --rows 5000000` shows all.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tables import Figure, at_least, at_most, bound

import evergrad as eg
from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.manifest import Manifest, now, write_manifest
from evergrad.checkpoint.pieces import PIECE_BYTES, Piece, RowsPiece
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.storage import Storage
from evergrad.kernels.hashing import slots_of
from evergrad.kernels.warm import warm
from evergrad.messages import Place, Progress, Schema, TableSpec, UpdateName, UpdateSpec
from evergrad.placement import SLOTS

ROWS, DIM, TURNS = 5_000_000, 16, 5
CHUNK = 16 << 20
SCHEMA = Schema(
    0, UpdateSpec(UpdateName.SYNC, 1), (TableSpec("user", DIM, eg.Adagrad().spec(), eg.init_rows.zeros()),), ()
)
FOLDER = Path(os.environ.get("EVERGRAD_BENCH_DIR", tempfile.gettempdir()))


def figures(quick: bool) -> Iterator[Figure]:
    """All figures."""
    yield from files(200_000 if quick else ROWS)


def files(rows: int) -> Iterator[Figure]:
    """Writing, restoring and exporting, each beside plain input and output."""
    with tempfile.TemporaryDirectory(prefix="evergrad-bench-", dir=FOLDER) as folder:
        storage, plain = Storage(Path(folder) / "checkpoints"), Path(folder) / "plain"
        cut = list(_cut(rows))
        size = sum(piece.keys.nbytes + piece.rows.nbytes for piece in cut)
        about = f"{rows:,} rows x ({DIM} + {DIM}), {size / 1e6:,.0f} MB"
        save_s, write_s = _median_s(lambda: _save(storage, cut), lambda: _write(plain, cut), lambda: _clear(folder))
        yield at_least(f"checkpoint: write rate / plain write, {about}", write_s / save_s, "x", 0.5)
        yield bound("plain write", size / write_s / 1e9, "GB/s")
        manifest = _save(storage, cut)
        _write(plain, cut)
        cut.clear()  # memory for the page cache
        paths = [Path(storage.url) / "checkpoint_1" / file.path for file in manifest.files]
        restore_s, read_s = _median_s(
            lambda: _restore(storage, manifest), lambda: _read(paths), lambda: push_out(paths)
        )
        yield at_least("checkpoint: restore rate / plain read, out of the page cache", read_s / restore_s, "x", 0.4)
        yield bound("plain read", size / read_s / 1e9, "GB/s")
        restore_s, read_s = _median_s(lambda: _restore(storage, manifest), lambda: _read(paths), lambda: None)
        yield at_least("checkpoint: restore rate / plain read, in the page cache", read_s / restore_s, "x", 0.4)
        yield from _export(storage, Path(folder))


def keys_of(rows: int) -> np.ndarray:
    """The keys of the table."""
    return np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows, np.int64)


def save_of(storage: Storage, rows: int) -> Manifest:
    """A checkpoint of so many rows; takes twice a piece of memory besides the keys."""
    return _save(storage, _cut(rows))


def _cut(rows: int) -> Iterator[RowsPiece]:
    """Pieces as a pserver hands them out."""
    random, keys = np.random.default_rng(1), keys_of(rows)
    keys = keys[np.lexsort((keys, slots_of(keys)))]
    slots = slots_of(keys)
    count = -(-rows * (8 + 8 * DIM) // PIECE_BYTES)
    none = np.empty(0, np.int64)
    for n in range(count):
        owned = range(SLOTS * n // count, SLOTS * (n + 1) // count)
        a, b = np.searchsorted(slots, (owned.start, owned.stop))
        values = random.standard_normal((b - a, 2 * DIM), np.float32)
        yield RowsPiece(0, owned, keys[a:b], values, None, none, np.empty((0, 2), np.int32))


def _save(storage: Storage, cut: Iterable[RowsPiece]) -> Manifest:
    infos = tuple(info for piece in cut for info in write_piece(storage, 1, SCHEMA, Place(0), piece))
    manifest = Manifest(
        job="bench", lineage="bench", serial=1, created=now(), places=1, generation=0, schema=SCHEMA,
        progress=Progress(), updates={"user": 1}, files=infos,
    )  # fmt: skip
    write_manifest(storage, manifest)
    return manifest


def _write(path: Path, cut: list[RowsPiece]) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in cut:
            for array in (piece.keys, piece.rows):
                data = array.reshape(-1).view(np.uint8).data
                for start in range(0, len(data), CHUNK):
                    file.write(data[start : start + CHUNK])
        os.fsync(file.fileno())


def _restore(storage: Storage, manifest: Manifest) -> list[Piece]:
    """All of it in memory in the end, as the pserver and the plain reader have it."""
    return list(pieces(storage, manifest, 0, 1))


def _read(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


def _clear(folder: str) -> None:
    shutil.rmtree(Path(folder) / "checkpoints", ignore_errors=True)
    (Path(folder) / "plain").unlink(missing_ok=True)
    os.sync()


def push_out(paths: list[Path]) -> None:
    """Have these files read from the disk next time."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _median_s(ours: Callable[[], object], theirs: Callable[[], object], prepare: Callable[[], object]) -> list[float]:
    """Median seconds of each, in turns; the first turn does not count."""
    times: list[list[float]] = [[], []]
    for _ in range(TURNS + 1):
        for work, taken in zip((ours, theirs), times, strict=True):
            prepare()
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return [float(np.median(taken[1:])) for taken in times]


def _export(storage: Storage, folder: Path) -> Iterator[Figure]:
    """`evergrad export` in a process of its own."""
    program = "from evergrad.cli import _main; import sys; _main(sys.argv[1:]); print(open('/proc/self/status').read())"
    argv = [sys.executable, "-c", program, "export", storage.url, str(folder / "model")]
    began = time.perf_counter()
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    yield bound("evergrad export", time.perf_counter() - began, "s")
    (peak_kb,) = re.findall(r"VmHWM:\s*(\d+) kB", done.stdout)
    yield at_most("evergrad export: most memory of its process", int(peak_kb) * 1024 / 1e6, "MB", 400)


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(description="Measure checkpoints beside plain input and output.")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the table")
    options = parser.parse_args()
    warm()
    for figure in files(options.rows):
        print(json.dumps(figure), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
