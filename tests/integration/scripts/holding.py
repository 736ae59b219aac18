"""Lets a test stop a training script at a place of its choice, and see what the script has computed.

`--hold PLACE=FILE`: at this place wait until FILE exists; `FILE.PID` says that this process has come so far. Places:
`epoch:N` (inside the first batch of epoch N), `evaluate:N` (inside the evaluation of epoch N), `end` (before saving).
`--diary FOLDER`: note each batch in FOLDER/PID.
`--every N`: make checkpoints beside the model, also every so many steps.
`--slow FOLDER`: while FOLDER/PID exists, a batch takes five times as long; FOLDER/PID.seen says that one did.
"""

import argparse
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import evergrad as eg

ROOT = Path(__file__).parents[3]
LONGEST_S = 90.0
SLOWER = 5

_pause = threading.Event()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that computing a batch takes")
    parser.add_argument("--hold", action="append", default=[], metavar="PLACE=FILE")
    parser.add_argument("--diary", type=Path)
    parser.add_argument("--every", type=int, metavar="N")
    parser.add_argument("--slow", type=Path)
    return parser


def checkpoints(options: argparse.Namespace) -> eg.Checkpoints | None:
    """Those that `--every` asks for."""
    return eg.Checkpoints(options.out.with_name("checkpoints"), options.every, keep=100) if options.every else None


class Holding:
    """What `parser` has read, put to use."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._files = {place: Path(file) for place, _, file in (h.partition("=") for h in options.hold)}
        self._pause_s, self._diary = options.pause, options.diary
        self._slow = options.slow / str(os.getpid()) if options.slow else None

    def at(self, place: str) -> None:
        """The script is at this place."""
        file = self._files.pop(place, None)
        if file is None:
            return
        file.with_name(f"{file.name}.{os.getpid()}").touch()
        parent, end_s = os.getppid(), time.monotonic() + LONGEST_S
        while not file.exists() and os.getppid() == parent and time.monotonic() < end_s:
            _pause.wait(0.02)

    def batch(self, epoch: int, ids: Iterable[int]) -> None:
        """The script is inside a batch of these samples."""
        if self._pause_s:
            _pause.wait(self._pause_s * (SLOWER if self._is_slow() else 1))
        if self._diary is not None:
            with (self._diary / str(os.getpid())).open("a") as file:
                file.write(" ".join(map(str, (epoch, *ids))) + "\n")
        self.at(f"epoch:{epoch}")

    def _is_slow(self) -> bool:
        if self._slow is None or not self._slow.exists():
            return False
        self._slow.with_suffix(".seen").touch()
        return True
