"""The demo: a model trained in one process, and again as a job that is hurt while it trains. Both are the same.

`make demo` runs it. It ends with status 1 if anything that it promises to show did not happen.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from evergrad.errors import ConfigError
from evergrad.launch.ask import ask_status
from evergrad.launch.jobfile import JobFile, read_latest
from evergrad.messages import Role, Status

SCRIPT = str(Path("examples") / "movielens.py")
PSERVERS, TRAINERS = 2, 3
START_WITHIN_S = 90.0
TURN_S = 0.02
T = TypeVar("T")
EVERGRAD = [sys.executable, "-m", "evergrad"]


class DemoError(Exception):
    """Something the demo is to show did not happen."""


def main() -> int:
    """Run the demo; returns its exit status."""
    parser = argparse.ArgumentParser(description="Train alone and as a job that is hurt; compare to the bit.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--data", help="a GroupLens folder to read instead of downloading MovieLens 100K")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args()
    began = time.monotonic()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    script_args = ["--epochs", str(options.epochs), *(["--data", options.data] if options.data else [])]
    try:
        alone(script_args, options.out / "alone")
        as_a_job(script_args, options.out / "job", options.out / "logs")
        compare(options.out / "alone", options.out / "job")
    except DemoError as exc:
        print(f"\nThe demo failed: {exc}")
        return 1
    print(f"\nThe demo took {time.monotonic() - began:.0f} s.")
    return 0


def title(text: str) -> None:
    """Print the head of a part."""
    print(f"\n== {text}", flush=True)


def say(text: str) -> None:
    """Print what the demo itself does or sees."""
    print(f"-> {text}", flush=True)


# -- the two trainings -------------------------------------------------------------------------------------------------


def alone(script_args: list[str], out: Path) -> None:
    """Train in one process: master, pserver and trainer inside it, no sockets."""
    title("1. Training in one process")
    say(f"python {' '.join([SCRIPT, *script_args])}")
    with running([sys.executable, SCRIPT, *script_args, "--out", str(out)]) as process:
        finish(process, "the training in one process")


def as_a_job(script_args: list[str], out: Path, logs: Path) -> None:
    """Train as a job of processes; start one more trainer late, and kill another, both inside an epoch."""
    title(f"2. The same script as a job of {PSERVERS} pservers and {TRAINERS} trainers")
    script = [SCRIPT, *script_args, "--out", str(out)]
    options = ["--pservers", str(PSERVERS), "--trainers", str(TRAINERS), "--log-dir", str(logs)]
    say(f"evergrad run --pservers {PSERVERS} --trainers {TRAINERS} {' '.join([SCRIPT, *script_args])}")
    with running([*EVERGRAD, "run", *options, *script]) as launcher:
        job = wait_for(lambda: found(logs), launcher, "the job to start")
        watch = Watch(job, launcher)
        watch.first_epoch()
        with running([*EVERGRAD, "trainer", "--log-dir", str(logs), *script]) as late:
            join_late(watch, late)
            kill_one(watch, launcher)
            finish(launcher, "the job")
            finish(late, "the trainer that joined late")


def join_late(watch: "Watch", late: "Running") -> None:
    """See the late trainer become a member while an epoch is under way."""
    say(f"one more trainer has been started, pid {late.pid}: evergrad trainer {SCRIPT} ...")
    status = watch.until(lambda s: late.pid in trainers(s) and is_inside_epoch(s), "the late trainer to join")
    say(f"it has joined in {where(status)}; trainers now: {len(trainers(status))}")


def kill_one(watch: "Watch", launcher: "Running") -> None:
    """Kill one of the launcher's own trainers inside an epoch, and see that the job goes on inside it."""
    ours = {child.pid for child in psutil.Process(launcher.pid).children(recursive=True)}
    status = watch.until(lambda s: is_inside_epoch(s) and ours & trainers(s), "the middle of an epoch")
    victim = max(ours & trainers(status))
    os.kill(victim, signal.SIGKILL)
    say(f"killed a trainer with SIGKILL in {where(status)}: pid {victim}")
    status = watch.until(lambda s: victim not in trainers(s) and is_inside_epoch(s, 0.0, 1.0), "the loss to be noticed")
    say(f"the job goes on in {where(status)} with {len(trainers(status))} trainers")


# -- watching a job ----------------------------------------------------------------------------------------------------


class Watch:
    """Asks a job how it goes, again and again."""

    def __init__(self, job: JobFile, launcher: "Running") -> None:
        self._job = job
        self._launcher = launcher

    def first_epoch(self) -> Status:
        """Wait for the first epoch to be under way."""
        return self.until(lambda s: is_inside_epoch(s, 0.0, 1.0), "the first epoch")

    def until(self, condition: Callable[[Status], object], what: str) -> Status:
        """The first status for which the condition holds."""

        def look() -> Status | None:
            with contextlib.suppress(ConfigError):
                status = ask_status(self._job.job, self._job.master)
                return status if condition(status) and not status.ended else None
            return None

        return wait_for(look, self._launcher, what)


def found(logs: Path) -> JobFile | None:
    """The job, once its file is there."""
    with contextlib.suppress(ConfigError):
        return read_latest(logs)
    return None


def trainers(status: Status) -> set[int]:
    """The pids of a job's trainers."""
    return {m.pid for m in status.members if m.role is Role.TRAINER}


def is_inside_epoch(status: Status, after: float = 0.1, before: float = 0.7) -> bool:
    """Whether a part of an epoch's steps is done that lies between these."""
    return status.epoch >= 0 and after * status.steps < status.step < before * status.steps


def where(status: Status) -> str:
    """The place in the training, in words."""
    return f"epoch {status.epoch} (of {status.epochs}), step {status.step} of {status.steps}"


# -- processes ---------------------------------------------------------------------------------------------------------


class Running:
    """A process whose output is shown, indented."""

    def __init__(self, argv: list[str]) -> None:
        self._popen = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._show)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self._popen.poll()

    def wait(self) -> int:
        """The exit status, after all output was shown."""
        status = self._popen.wait()
        self._reader.join()
        return status

    def stop(self) -> None:
        """Have it leave, if it still runs."""
        if self.poll() is None:
            self._popen.terminate()
        self.wait()

    def _show(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                print(f"     {line.rstrip()}", flush=True)


@contextlib.contextmanager
def running(argv: list[str]) -> Iterator[Running]:
    """A process that is gone when the block is left."""
    process = Running(argv)
    try:
        yield process
    finally:
        process.stop()


def finish(process: Running, what: str) -> None:
    """Wait for an end that must be a good one."""
    if (status := process.wait()) != 0:
        raise DemoError(f"{what} ended with exit status {status}")


def wait_for(look: Callable[[], T | None], process: Running, what: str) -> T:
    """What `look` finds, while the process runs and for a limited time."""
    deadline = time.monotonic() + START_WITHIN_S
    while (seen := look()) is None:
        if process.poll() is not None:
            raise DemoError(f"the job ended while the demo waited for {what}; try more --epochs")
        if time.monotonic() > deadline:
            raise DemoError(f"waited {START_WITHIN_S:.0f} s for {what}")
        time.sleep(TURN_S)
    return seen


# -- comparing ---------------------------------------------------------------------------------------------------------


def compare(one: Path, other: Path) -> None:
    """Compare two folders file by file."""
    title("3. Comparing both models")
    names = sorted({str(p.relative_to(d)) for d in (one, other) for p in d.rglob("*") if p.is_file()})
    different = [name for name in names if digest(one / name) != digest(other / name)]
    for name in names:
        print(f"     {digest(one / name)}  {one / name}\n     {digest(other / name)}  {other / name}")
    if different or not names:
        raise DemoError(f"the models differ: {', '.join(different) or 'there are no files'}")
    say(f"{len(names)} files, the same to the bit")


def digest(path: Path) -> str:
    """The SHA-256 of a file, or a word for none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing".ljust(64)


if __name__ == "__main__":
    sys.exit(main())
