"""The demo: a model trained in one process, and again as a job that is hurt while it trains. Both are the same.

`make demo` runs it. It ends with status 1 if anything that it promises to show did not happen.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from jobs import Launched, Running, Shown, Unmet, digests, is_inside, trainers

from evergrad.messages import Status

SCRIPT = Path("examples") / "movielens.py"
PSERVERS, TRAINERS = 2, 3
FINISH_WITHIN_S = 600.0


class ShownJob(Launched):
    """A job whose output is shown."""

    process = Shown


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
        alone(script_args, options.out)
        as_a_job(script_args, options.out)
        compare(options.out / "alone", options.out / "job")
    except Unmet as exc:
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


def alone(script_args: list[str], folder: Path) -> None:
    """Train in one process: master, pserver and trainer inside it, no sockets."""
    title("1. Training in one process")
    say(f"python {' '.join([str(SCRIPT), *script_args])}")
    argv = [sys.executable, SCRIPT, *script_args, "--out", folder / "alone"]
    process = Shown(argv, folder / "alone.out")
    try:
        finish(process, "the training in one process")
    finally:
        process.kill()


def as_a_job(script_args: list[str], folder: Path) -> None:
    """Train as a job of processes; start one more trainer late, and kill another, both inside an epoch."""
    title(f"2. The same script as a job of {PSERVERS} pservers and {TRAINERS} trainers")
    say(f"evergrad run --pservers {PSERVERS} --trainers {TRAINERS} {' '.join([str(SCRIPT), *script_args])}")
    args = (*script_args, "--out", folder / "job")
    with ShownJob(folder, SCRIPT, *args, pservers=PSERVERS, trainers=TRAINERS) as job:
        job.until(is_inside, "the first epoch")
        late = join_late(job)
        kill_one(job)
        finish(job.launcher, "the job")
        finish(late, "the trainer that joined late")


def join_late(job: Launched) -> Running:
    """See a late trainer become a member while an epoch is under way."""
    late = job.join()
    say(f"one more trainer has been started, pid {late.pid}: evergrad trainer {SCRIPT} ...")
    status = job.until(lambda s: late.pid in trainers(s) and is_midway(s), "the late trainer to join")
    say(f"it has joined in {where(status)}; trainers now: {len(trainers(status))}")
    return late


def kill_one(job: Launched) -> None:
    """Kill one of the launcher's own trainers inside an epoch, and see that the job goes on inside it."""
    ours = {process.pid for process in job.family()}
    status = job.until(lambda s: is_midway(s) and ours & trainers(s).keys(), "the middle of an epoch")
    victim = max(ours & trainers(status).keys())
    os.kill(victim, signal.SIGKILL)
    say(f"killed a trainer with SIGKILL in {where(status)}: pid {victim}")
    status = job.until(lambda s: victim not in trainers(s) and is_inside(s), "the loss to be noticed")
    say(f"the job goes on in {where(status)} with {len(trainers(status))} trainers")


def is_midway(status: Status) -> bool:
    """Whether an epoch is so far that what happens now happens inside it."""
    return is_inside(status) and 0.1 * status.steps < status.step < 0.7 * status.steps


def where(status: Status) -> str:
    """The place in the training, in words."""
    return f"epoch {status.epoch} (of {status.epochs}), step {status.step} of {status.steps}"


def finish(process: Running, what: str) -> None:
    """Wait for an end that must be a good one."""
    if (status := process.wait(FINISH_WITHIN_S)) != 0:
        raise Unmet(f"{what} ended with exit status {status}")


# -- comparing ---------------------------------------------------------------------------------------------------------


def compare(one: Path, other: Path) -> None:
    """Compare two folders file by file."""
    title("3. Comparing both models")
    found = {folder: digests(folder) for folder in (one, other)}
    names = sorted(found[one].keys() | found[other].keys())
    for name in names:
        for folder in (one, other):
            print(f"     {found[folder].get(name, 'missing').ljust(64)}  {folder / name}")
    if not names:
        raise Unmet("there are no models")
    if found[one] != found[other]:
        raise Unmet("the models differ")
    say(f"{len(names)} files, the same to the bit")


if __name__ == "__main__":
    sys.exit(main())
