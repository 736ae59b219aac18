"""Chaos: jobs of real processes are hurt at random moments, under each update rule, and must keep their promises.

`make chaos` runs it. A round is one job under `evergrad run`, hurt until it ends. `Sync` and `LocalSGD` must then have
saved the model that an undisturbed run saves, to the bit; under `Async` each sample must count exactly once. It ends
with status 1 if a promise was broken, or if a kind of fault never struck.

Of the films (`Sync` with BatchNorm and dropout) one job has a process killed fifty times: a trainer, a pserver, the
master, all trainers, or everything but the launcher.

A fault counts when the job has felt it: the killed process ended so, the frozen one was declared dead, the added one
became a member.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jobs import COUNT, FILMS, TRAIN, Launched, Running, Unmet, digests, environment, trainers
from rich.console import Console
from rich.table import Table as Grid
from traces import miscounted

from evergrad.messages import Status

SAMPLES, BATCH, PAUSE_S, EVERY = 1600, 16, 0.05, 10
"""A round's script: 100 batches an epoch of at least so many seconds each, with a checkpoint every so many steps."""
GAP_S = 1.5
"""Seconds from one fault to the next, on average."""
MOST_TRAINERS = 5
DESERTED_S = 10.0
"""A job that has had no trainer for so long is given one: those that have left do not come back by themselves."""
ROUND_WITHIN_S = 900.0
TURN_S = 0.02
LEFT = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Rule:
    """What is trained: a script with an update rule of `scripts/updates.py`, and what must hold of the saved model.

    `broken` takes the model and one of an undisturbed run, and says what is broken in words; empty if nothing is.
    In a round of so many `epochs` it is hurt at most `most` times by these `kinds` of faults, in all rounds at least
    `least` times.
    """

    name: str
    script: Path
    promise: str
    broken: Callable[["Rule", Path, Path], str]
    kinds: tuple[str, ...]
    epochs: int = 6
    least: int = 1
    most: int = 50
    update: str = "sync"


def other_bits(rule: Rule, model: Path, undisturbed: Path) -> str:
    """How a model differs from that of the undisturbed run."""
    found, wanted = digests(model), digests(undisturbed)
    return ", ".join(name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name))


def other_counts(rule: Rule, model: Path, undisturbed: Path) -> str:
    """Which samples were not applied exactly once."""
    return miscounted(model, rule.update, SAMPLES, rule.epochs, BATCH)


# -- faults ------------------------------------------------------------------------------------------------------------

OF_TRAINERS = ("kill", "kill all", "freeze", "leave", "slow", "join")
OF_SERVERS = ("pserver", "master", "everything")
"""Kills, of everything but the launcher at last."""
KINDS = OF_TRAINERS + OF_SERVERS
RULES = (
    Rule("sync", TRAIN, "same bits", other_bits, KINDS),
    Rule("async", COUNT, "each sample once", other_counts, KINDS, update="async"),
    Rule("bounded", COUNT, "each sample once", other_counts, KINDS, update="bounded"),
    Rule("local-sgd", TRAIN, "same bits", other_bits, KINDS, update="local-sgd"),
    Rule("films", FILMS, "same bits", other_bits, ("kill", "kill all", *OF_SERVERS), epochs=40, least=50),
)


@dataclass(slots=True)
class Fault:
    """Something done to a process. `is_felt`: the job has noticed."""

    kind: str
    pid: int
    is_felt: bool = False


@dataclass(slots=True)
class Tormentor:
    """Hurts one job. Only processes that the job has started are touched, by their pid.

    Faults are drawn from a bag of all kinds until it is empty, then from another, so that each kind comes up.
    """

    job: Launched
    kinds: tuple[str, ...]
    chance: random.Random
    slow: Path
    faults: list[Fault] = field(default_factory=list)
    joiners: list[Running] = field(default_factory=list)
    strikes: int = 0
    _frozen: dict[int, tuple[psutil.Process, Fault]] = field(default_factory=dict)
    _bag: list[str] = field(default_factory=list)
    _fell_back_from: int = -1
    _seen_s: float = field(default_factory=time.monotonic)

    def strike(self, status: Status) -> bool:
        """Do one more thing to the job; returns whether it could be done to it now."""
        self._bag = self._bag or self.chance.sample(self.kinds, len(self.kinds))
        kind = self._bag[-1]
        if kind in OF_SERVERS:
            return self._strike_servers(kind, status)
        there = self._victims(status)
        if not self._is_possible(kind, there, status):
            return False
        self._bag.pop()
        self.strikes += 1
        pid = self.chance.choice(sorted(there)) if there else 0
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            self._do(kind, pid, there)
        return True

    def _do(self, kind: str, pid: int, there: Mapping[int, psutil.Process]) -> None:
        match kind:
            case "join":
                self._join()
            case "slow":
                (self.slow / str(pid)).touch()
                self.faults.append(Fault(kind, pid))
            case "freeze":
                self._send(kind, there[pid], signal.SIGSTOP)
                self._frozen[pid] = there[pid], self.faults[-1]
            case "leave":
                self._send(kind, there[pid], signal.SIGTERM)
            case "kill":
                self._send(kind, there[pid], signal.SIGKILL)
            case "kill all":
                for process in there.values():
                    self._send(kind, process, signal.SIGKILL)

    def _strike_servers(self, kind: str, status: Status) -> bool:
        """Kill a pserver, the master or everything; not before there is something new to fall back to."""
        newest = status.checkpoints.newest if status.checkpoints is not None else None
        if status.phase != "training" or newest is None or newest <= self._fell_back_from:
            return False
        victims = {name: p for name, p in self.job.members().items() if kind in ("everything", name.partition("-")[0])}
        if not victims:
            return False
        if kind == "pserver":
            name = self.chance.choice(sorted(victims))
            victims = {name: victims[name]}
        self._bag.pop()
        self._fell_back_from = self._fell_back_from if kind == "master" else newest
        self.strikes += 1
        for process in victims.values():
            self._frozen.pop(process.pid, None)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._send(kind, process, signal.SIGKILL)
        return True

    def _is_possible(self, kind: str, there: Collection[int], status: Status) -> bool:
        match kind:
            case "join":
                return len(trainers(status)) < MOST_TRAINERS
            case "leave" | "freeze":  # whoever leaves does not come back by itself
                return len(there) > 1
            case _:
                return bool(there)

    def look(self, status: Status) -> None:
        """Notice what the job has felt; thaw who was declared dead; leave no job deserted."""
        there = trainers(status)
        if there:
            self._seen_s = time.monotonic()
        elif time.monotonic() - self._seen_s > DESERTED_S:
            self._seen_s = time.monotonic()
            self._join()
        for pid, (_, fault) in list(self._frozen.items()):
            if pid not in there:
                fault.is_felt = True
                self._thaw(pid)
        for fault in self.faults:
            if fault.kind == "join" and fault.pid in there:
                fault.is_felt = True

    def end(self) -> None:
        """The job is ending: nothing may stay frozen."""
        for pid in list(self._frozen):
            self._thaw(pid)

    def settle(self) -> list[str]:
        """All is over: see which signals have struck. Returns what joiners did wrong."""
        wrong = []
        too_late = {fault.pid for fault in self.faults if fault.kind == "join" and not fault.is_felt}
        for joiner in self.joiners:
            if joiner.pid in too_late:  # it looks for a job that is over
                joiner.kill()
        ended = {joiner.pid: joiner.wait() for joiner in self.joiners}
        for fault in self.faults:
            match fault.kind:
                case "kill" | "kill all" | "pserver" | "master" | "everything":
                    is_told = f"(pid {fault.pid}) was killed by SIGKILL" in self.job.text
                    fault.is_felt = is_told or ended.get(fault.pid) == -signal.SIGKILL
                case "leave":
                    is_told = f"(pid {fault.pid}) was asked to leave and left" in self.job.text
                    fault.is_felt = is_told or ended.get(fault.pid) == LEFT
                case "slow":
                    fault.is_felt = (self.slow / f"{fault.pid}.seen").exists()
                case "join" if fault.is_felt and ended[fault.pid] not in (0, LEFT, -signal.SIGKILL):
                    wrong.append(f"an added trainer ended with status {ended[fault.pid]}")
        return wrong

    def _victims(self, status: Status) -> dict[int, psutil.Process]:
        """The trainers that are members and not frozen."""
        added = [psutil.Process(joiner.pid) for joiner in self.joiners if joiner.is_alive]
        ours = {process.pid: process for process in [*self.job.family(), *added]}
        return {pid: ours[pid] for pid in trainers(status) if pid in ours and pid not in self._frozen}

    def _send(self, kind: str, process: psutil.Process, number: int) -> None:
        process.send_signal(number)
        self.faults.append(Fault(kind, process.pid))

    def _join(self) -> None:
        joiner = self.job.join(name=f"joiner-{len(self.joiners)}")
        self.joiners.append(joiner)
        self.faults.append(Fault("join", joiner.pid))

    def _thaw(self, pid: int) -> None:
        process, _ = self._frozen.pop(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


# -- rounds ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What the rounds of a rule have shown."""

    rounds: int = 0
    strikes: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    felt: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


class Chaos:
    """Rounds under one rule after the other, in a folder of their own."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        self._undisturbed: dict[Rule, Path] = {}
        self.rounds = 0

    def round(self, rule: Rule, most: int, outcome: Outcome) -> None:
        """One job, hurt at most so often; what it shows is added to the outcome."""
        self.rounds += 1
        folder = self._folder / f"round-{self.rounds}"
        (folder / "slow").mkdir(parents=True)
        sizes = {"pservers": self._chance.randint(1, 3), "trainers": self._chance.randint(2, 4)}
        say(f"round {self.rounds}: {rule.name} with {sizes['pservers']} pservers and {sizes['trainers']} trainers")
        undisturbed = self._undisturbed_model(rule)
        args = (*arguments(rule, folder / "model"), "--pause", PAUSE_S, "--every", EVERY, "--slow", folder / "slow")
        often = ("--max-restarts", "1000")
        with Launched(folder, rule.script, *args, options=often, **sizes) as job:
            tormentor = Tormentor(job, rule.kinds, self._chance, folder / "slow")
            try:
                torment(tormentor, self._chance, most)
                found = self._found(rule, tormentor, undisturbed)
            except Unmet as exc:
                found = [str(exc)]
        outcome.rounds, outcome.strikes = outcome.rounds + 1, outcome.strikes + tormentor.strikes
        outcome.struck.update(fault.kind for fault in tormentor.faults)
        outcome.felt.update(fault.kind for fault in tormentor.faults if fault.is_felt)
        outcome.broken += [f"round {self.rounds}: {what}; see {folder}" for what in found]
        felt = sum(fault.is_felt for fault in tormentor.faults)
        hurt = f"hurt {tormentor.strikes} times, {felt} faults of {len(tormentor.faults)} felt"
        say(f"   {hurt}; {'; '.join(found) or rule.promise}")
        if not found:
            shutil.rmtree(folder)

    def _found(self, rule: Rule, tormentor: Tormentor, undisturbed: Path) -> list[str]:
        """What is broken, once the job has ended."""
        job = tormentor.job
        if (status := job.launcher.wait(ROUND_WITHIN_S)) != 0:
            return [f"the job ended with status {status}:\n{job.text}"]
        wrong = tormentor.settle()
        broken = rule.broken(rule, job.folder / "model", undisturbed)
        return wrong + ([f"not {rule.promise}: {broken}"] if broken else [])

    def _undisturbed_model(self, rule: Rule) -> Path:
        if rule not in self._undisturbed:
            model = self._undisturbed[rule] = self._folder / f"{rule.name}-undisturbed"
            argv = [sys.executable, str(rule.script), *arguments(rule, model)]
            done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Unmet(f"the undisturbed run failed:\n{done.stderr}")
        return self._undisturbed[rule]


def torment(tormentor: Tormentor, chance: random.Random, most: int) -> None:
    """Hurt a job again and again until it ends."""
    job, strike_s = tormentor.job, 0.0
    end_s = time.monotonic() + ROUND_WITHIN_S
    while status := status_of(job):
        now_s = time.monotonic()
        if now_s > end_s:
            raise Unmet(f"the job did not end within {ROUND_WITHIN_S:.0f} s; it waits for {status.waiting_for!r}")
        tormentor.look(status)
        if now_s >= strike_s and tormentor.strikes < most and tormentor.strike(status):
            strike_s = now_s + chance.expovariate(1 / GAP_S)
        time.sleep(TURN_S)
    tormentor.end()


def status_of(job: Launched) -> Status | None:
    """How a job goes; None once it is over."""
    try:
        status = job.status()
    except Unmet:
        if job.launcher.is_alive:
            raise
        return None
    return None if status.ended else status


def arguments(rule: Rule, model: Path) -> list[str]:
    """What a script is told, apart from how it is hurt."""
    sizes = ("--samples", SAMPLES, "--epochs", rule.epochs, "--batch-size", BATCH)
    return [*map(str, ("--rule", rule.update, "--out", model, *sizes))]


def say(text: str) -> None:
    """Print a line now."""
    print(text, flush=True)


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run rounds until the time is over; returns the exit status."""
    parser = argparse.ArgumentParser(description="Hurt jobs of real processes; check that their promises hold.")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no round after so long")
    parser.add_argument("--faults", type=int, default=10**9, help="at most so many faults under each rule")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of sizes and faults")
    parser.add_argument("--rule", choices=[rule.name for rule in RULES], help="this rule only")
    options = parser.parse_args()
    say(f"seed {options.seed} (the same sizes and faults, at about the same moments, with --seed {options.seed})")
    outcomes = {rule: Outcome() for rule in RULES if options.rule in (None, rule.name)}
    folder = Path(tempfile.mkdtemp(prefix="evergrad-chaos-"))
    chaos = Chaos(folder, random.Random(options.seed))
    end_s = time.monotonic() + options.seconds
    while open_rules := [rule for rule, o in outcomes.items() if o.strikes < options.faults or not o.rounds]:
        if time.monotonic() > end_s and all(o.rounds for o in outcomes.values()):
            break
        rule = min(open_rules, key=lambda rule: outcomes[rule].rounds)
        chaos.round(rule, min(rule.most, options.faults - outcomes[rule].strikes), outcomes[rule])
    Console(width=120).print(grid(outcomes))
    wrong = wrong_with(outcomes, options.faults)
    for text in wrong:
        say(text)
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def wrong_with(outcomes: dict[Rule, Outcome], most: int) -> list[str]:
    """What makes the whole run a failure."""
    broken = [f"{rule.name}: {what}" for rule, outcome in outcomes.items() for what in outcome.broken]
    never = {rule.name: [kind for kind in rule.kinds if not o.felt[kind]] for rule, o in outcomes.items()}
    few = [
        f"{rule.name}: hurt only {o.strikes} times in {o.rounds} jobs, not {rule.least} times"
        for rule, o in outcomes.items()
        if o.strikes < min(rule.least, most)
    ]
    missing = [f"{name}: none of these was felt: {', '.join(kinds)}" for name, kinds in never.items() if kinds]
    return broken + few + missing


def grid(outcomes: dict[Rule, Outcome]) -> Grid:
    """Faults by kind and rule, and what was checked."""
    table = Grid("faults felt / injected", *(rule.name for rule in outcomes))
    for kind in KINDS:
        cells = (f"{o.felt[kind]} / {o.struck[kind]}" if kind in rule.kinds else "" for rule, o in outcomes.items())
        table.add_row(kind, *cells)
    table.add_row("all", *(f"{o.felt.total()} / {o.struck.total()}" for o in outcomes.values()), end_section=True)
    table.add_row("jobs", *(str(o.rounds) for o in outcomes.values()))
    table.add_row("checked", *(rule.promise for rule in outcomes))
    table.add_row("broken", *(str(len(o.broken)) for o in outcomes.values()))
    return table


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main())
