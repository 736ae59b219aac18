"""What trouble costs: a slow trainer under each update rule, and trainers that are killed again and again.

The trainers' computing is sleep (`sleeper.py`), so that two cores are enough. Both parts compare stretches of jobs of
real processes under `evergrad run`.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import sleeper

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from jobs import Launched, trainers, until

SCRIPT = Path(__file__).with_name("sleeper.py")
TRAINERS = 4
FAULT_EVERY_S = 10.0
POLL_S = 0.01
WARM_S = 2.0


class Case(NamedTuple):
    """An update rule of `sleeper.py`, the trainers it is given, and further options of the launcher."""

    title: str
    update: str
    trainers: int
    options: tuple[str, ...] = ()


SLOW = (
    Case("Sync(4)", "sync", TRAINERS),
    Case("Sync(4) and a spare trainer", "sync with a spare", TRAINERS + 1),
    Case("Async(max_staleness=8)", "bounded", TRAINERS),
    Case("Async", "async", TRAINERS),
)
KILLED = (
    Case("Sync(4)", "sync", TRAINERS),
    Case("Sync(4), --standby", "sync", TRAINERS, ("--standby",)),
    Case("Sync(12)", "sync of 12", TRAINERS),
    Case("Async", "async", TRAINERS),
)


class Stretch(NamedTuple):
    """What was seen of a job for a while: samples a second, and the share of time in which trainers did not compute."""

    rate: float
    waiting: float


# -- a slow trainer ----------------------------------------------------------------------------------------------------


def slow_trainer(case: Case, seconds: float) -> tuple[Stretch, Stretch]:
    """With one trainer five times slower than the others, and without."""
    with running(case, slow="trainer-0") as (job, folder):
        slow = stretch(job, folder, seconds)
    with running(case) as (job, folder):
        return slow, stretch(job, folder, seconds)


def stretch(job: Launched, folder: Path, seconds: float) -> Stretch:
    """Watch a job for so long."""
    before, status, began_s = computed(folder), job.status(), time.monotonic()
    time.sleep(seconds)
    after, rate = computed(folder), (job.status().samples - status.samples) / (time.monotonic() - began_s)
    shares = []
    for name, (at_s, computed_s) in after.items():
        since_s, computed_before_s = before[name]
        shares.append(1 - (computed_s - computed_before_s) / (at_s - since_s))
    return Stretch(rate, statistics.mean(shares))


def computed(folder: Path) -> dict[str, tuple[float, float]]:
    """What each trainer has written: when, and how long it has computed until then."""
    found = {}
    for file in folder.glob("trainer-*"):
        at_s, computed_s = map(float, file.read_text().split())
        found[file.name] = at_s, computed_s
    return found


# -- trainers that are killed ------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """What faults cost, as shares of the samples of an undisturbed stretch; `down_s`: of one fault, in seconds."""

    all: float
    own: float
    down_s: float


def killed_trainers(case: Case, faults: int) -> Loss:
    """One trainer after the other is killed, one every ten seconds, between two undisturbed stretches of one job."""
    seconds = faults * FAULT_EVERY_S
    with running(case) as (job, folder):
        before = stretch(job, folder, seconds / 2).rate
        down_s, rate = faults_one_by_one(job, faults)
        after = stretch(job, folder, seconds / 2).rate
    undisturbed = (before + after) / 2
    return Loss(1 - rate / undisturbed, sum(down_s) / (case.trainers * seconds), statistics.median(down_s))


def faults_one_by_one(job: Launched, faults: int) -> tuple[list[float], float]:
    """Kill trainers in turn; returns for how long each was away, and the samples a second meanwhile."""
    first, began_s = job.status().samples, time.monotonic()
    down_s = []
    for number in range(faults):
        there = {m.name: pid for pid, m in trainers(job.status()).items()}
        name = f"trainer-{number % len(there)}"
        os.kill(there[name], signal.SIGKILL)
        killed_s = time.monotonic()
        until(lambda: is_back(job, name, there[name]), f"{name} to be back")  # noqa: B023  # called at once
        down_s.append(time.monotonic() - killed_s)
        time.sleep(max(0.0, began_s + (number + 1) * FAULT_EVERY_S - time.monotonic()))
    return down_s, (job.status().samples - first) / (time.monotonic() - began_s)


def is_back(job: Launched, name: str, old_pid: int) -> bool:
    """Whether another process of this name is at work."""
    time.sleep(POLL_S)
    return any(m.name == name and pid != old_pid and m.doing for pid, m in trainers(job.status()).items())


# -- jobs --------------------------------------------------------------------------------------------------------------


@contextmanager
def running(case: Case, slow: str = "") -> Iterator[tuple[Launched, Path]]:
    """A job in which all trainers are at work, and the folder they write to."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        out = folder / "out"
        out.mkdir()
        args = ("--update", case.update, "--slow", slow, "--out", out)
        options = ("--max-restarts", "1000", *case.options)
        with Launched(folder, SCRIPT, *args, trainers=case.trainers, options=options) as job:
            until(lambda: len(computed(out)) == case.trainers, "all trainers to be at work")
            time.sleep(WARM_S)
            yield job, out


def figures(quick: bool = False) -> Iterator[dict[str, object]]:
    """Both parts: of slow trainers the median of some rounds, of killed ones a minute each."""
    rounds, seconds, faults = (1, 5.0, 1) if quick else (3, 10.0, 6)
    for case in SLOW:
        pairs = [slow_trainer(case, seconds) for _ in range(rounds)]
        rate = statistics.median(slow.rate / fast.rate for slow, fast in pairs)
        waiting = [100 * statistics.median(s.waiting for s in stretches) for stretches in zip(*pairs, strict=True)]
        yield {
            "name": f"samples/s, one of {case.trainers} trainers {sleeper.SLOWER} times slower / none: {case.title}",
            "value": rate,
            "unit": f"x (trainers wait {waiting[0]:.0f} % / {waiting[1]:.0f} % of their time)",
            "target": "-",
            "met": None,
        }
    for case in KILLED:
        loss = killed_trainers(case, faults)
        beyond = loss.all - loss.own
        yield {
            "name": f"samples/s lost by a kill every {FAULT_EVERY_S:.0f} s beyond its trainer's share: {case.title}",
            "value": 100 * beyond,
            "unit": f"% (its share {100 * loss.own:.1f} %, it is back after {loss.down_s:.1f} s)",
            "target": "< 5",
            "met": beyond < 0.05,
        }


if __name__ == "__main__":
    for figure in figures("--quick" in sys.argv):
        print(figure)
