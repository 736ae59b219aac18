"""Simulated jobs by the thousand: each seed is a job of another shape with other troubles; see `tests/simulation`.

`make simulate N=10000 SEED=0` runs it. It ends with status 1 if a promise was broken, and says how to see that again.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from evergrad.messages import UpdateName
from simulation.machine import huge_pages
from simulation.mutations import MUTATIONS
from simulation.world import Schedule, World

SHOW_EVERY_S = 5.0
MOST_SHOWN = 5
CHUNK = 10
COLLECT_EVERY = 20


class Run(NamedTuple):
    """What is left of one schedule. `fault`: what was wrong first."""

    seed: int
    fault: str | None
    events: Counter[str]
    virtual_s: float


def main() -> int:
    """Run schedules; returns the exit status: 1 if one of them broke a promise."""
    options = _parse()
    huge_pages(False)
    if options.trace:
        return _trace(options)
    if options.broken:
        return _find_broken_rules(options)
    print(f"{options.count:,} schedules from seed {options.seed} on, in {options.processes} processes", flush=True)
    began_s, shown_s = time.monotonic(), time.monotonic()
    events: Counter[str] = Counter()
    broken: list[Run] = []
    done, virtual_s = 0, 0.0
    for run in _runs(options):
        done, virtual_s = done + 1, virtual_s + run.virtual_s
        events.update(run.events)
        if run.fault is not None:
            broken.append(run)
            if len(broken) <= MOST_SHOWN:
                _show(run, options)
        if time.monotonic() - shown_s > SHOW_EVERY_S:
            shown_s = time.monotonic()
            rate = done / (shown_s - began_s)
            print(f"{done:,} of {options.count:,}, {rate:.0f} a second, {len(broken)} broken", flush=True)
    seconds = time.monotonic() - began_s
    print(
        f"{done:,} schedules in {seconds:.0f} s ({done / seconds:.0f} a second), {virtual_s / 3600:.0f} hours simulated"
    )
    print("troubles: " + ", ".join(f"{name} {count:,}" for name, count in sorted(events.items())))
    print(f"{len(broken)} broke a promise" + "".join(f"\n  seed {run.seed}: {run.fault}" for run in broken[:50]))
    return 1 if broken else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate jobs that are hurt, and check what was promised.")
    parser.add_argument("--count", type=int, default=1000, help="how many schedules (1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--rule", type=UpdateName, help=f"one update rule only: {', '.join(UpdateName)}")
    saved = {"action": argparse.BooleanOptionalAction, "help": "only jobs that make checkpoints, or none of them"}
    parser.add_argument("--saved", **saved)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at a time (one a core)")
    parser.add_argument("--trace", action="store_true", help="run the one seed and print all its messages")
    parser.add_argument("--broken", action="store_true", help="how soon each rule that is switched off is found")
    return parser.parse_args()


def _runs(options: argparse.Namespace) -> Iterator[Run]:
    work = ((seed, options.rule, options.saved) for seed in range(options.seed, options.seed + options.count))
    with multiprocessing.Pool(options.processes, _prepare) as pool:
        yield from pool.imap_unordered(_run, work, CHUNK)


def _prepare() -> None:
    """Of a process that runs schedules: it collects garbage when told to, between schedules."""
    logging.disable()  # that storage is full is not said a thousand times
    huge_pages(False)
    gc.freeze()
    gc.disable()


def _run(work: tuple[int, UpdateName | None, bool | None]) -> Run:
    seed, rule, is_saved = work
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    world = World(Schedule.drawn(seed, rule, is_saved=is_saved)).run()
    return Run(seed, str(world.faults[0]) if world.faults else None, world.events, world.clock.now_s)


def _show(run: Run, options: argparse.Namespace) -> None:
    rule = f" --rule {options.rule}" if options.rule else ""
    saved = {None: "", True: " --saved", False: " --no-saved"}[options.saved]
    again = f"{sys.executable} tools/simulate.py --seed {run.seed}{rule}{saved} --trace"
    print(f"BROKEN: {run.fault}\n  again: {again}", flush=True)


def _find_broken_rules(options: argparse.Namespace) -> int:
    """Look for each rule of `mutations.py` in the same schedules as for all others; 1 if one is not found."""
    missed = 0
    for mutation in MUTATIONS:
        with mutation.switched_off():
            seeds = range(options.seed, options.seed + options.count)
            worlds = (World(mutation.schedule(seed, is_drawn=True), mutation.roles).run() for seed in seeds)
            found = next(((number, w.faults[0]) for number, w in enumerate(worlds, 1) if w.faults), None)
        missed += found is None
        words = f"after {found[0]:4}: {found[1].kind.name.lower()}" if found else "not found"
        print(f"{words:22} without: {mutation.breaks}", flush=True)
    return 1 if missed else 0


def _trace(options: argparse.Namespace) -> int:
    world = World(Schedule.drawn(options.seed, options.rule, is_saved=options.saved)).run()
    print(world.report(lines=None))
    return 1 if world.faults else 0


if __name__ == "__main__":
    sys.exit(main())
