"""How long a job stands still when a pserver or its master is killed.

One job of real processes under `evergrad run`, whose trainers sleep instead of computing (`sleeper.py`). The time runs
from the kill until the master notes that the next step is committed on all pservers; its note says what took how long.
"""

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tables import Figure, at_most, bound

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from jobs import Launched

from evergrad.messages import Status

SCRIPT = Path(__file__).with_name("sleeper.py")
KILLS, LIMIT_S = 7, 2.0
APART_S = 11.0
"""A process that dies sooner is started again later."""


class Recovery(NamedTuple):
    """From the kill to the next step, of that to load, and what the master notes."""

    seconds: float
    load_s: float
    phases: str


def figures(quick: bool = False) -> Iterator[Figure]:
    """Medians of some kills of each."""
    kills = 2 if quick else KILLS
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        args, options = ("--update", "sync", "--out", out), ("--max-restarts", "1000")
        with Launched(Path(scratch), SCRIPT, *args, pservers=2, trainers=2, options=options) as job:
            for name, what in (("pserver-0", "a pserver"), ("master", "the master")):
                found = sorted(recovery(job, name) for _ in range(kills))
                middle = found[len(found) // 2]
                less = statistics.median(r.seconds - r.load_s for r in found)
                text = f"kill of {what} to the next committed step"
                unit = f"s ({found[0].seconds:.2f} to {found[-1].seconds:.2f} s; the middle one: {middle.phases})"
                if name == "master":
                    yield bound(text, less, unit)
                else:
                    yield at_most(f"{text}, less the time to load", less, unit, LIMIT_S)


def recovery(job: Launched, name: str) -> Recovery:
    """Kill this one and see the job go on."""
    time.sleep(APART_S)
    before = job.status()
    known = len(notes(before)) if name != "master" else 0  # the next master's notes are its own
    job.hit(name)
    began_s = time.monotonic()
    after = job.until(lambda s: (s.term, name) != (before.term, "master") and len(notes(s)) > known, "the job to go on")
    seconds, note = time.monotonic() - began_s, notes(after)[-1]
    load = re.search(r"([\d.]+) s to load", note)
    return Recovery(seconds, float(load[1]) if load else 0.0, note.partition(": ")[2])


def notes(status: Status) -> list[str]:
    """What the master notes of recoveries."""
    return [note for note in status.notes if note.startswith("the job has recovered")]


if __name__ == "__main__":
    for figure in figures("--quick" in sys.argv):
        print(figure)
