"""What goes wrong in a run: drawn from its seed, counted, and over at a time that is known.

A new kind of trouble is a function in `STRIKES`; one that only a job with checkpoints survives, in `CRASHES`.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from evergrad.messages import Exited, Request

from .launcher import Launcher
from .network import Cut, Weather
from .processes import LEASE_S, MASTER, MasterProcess, Process, PserverProcess, TrainerProcess

if TYPE_CHECKING:
    from .world import World

END_S = 20.0
"""From then on nobody is hurt any more, and what is frozen or cut off is so for the last time."""
LONGEST_S = LEASE_S + 3.0
MAX_TRAINERS = 6


@dataclass(frozen=True)
class Trouble:
    """What may go wrong. `mean_s`: mean seconds between two events of each kind that occurs.

    `stab`: the chance that a process is hurt between two messages it sends. `lasts`: the network stays as bad as it is.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    stab: float = 0.0
    lasts: bool = False
    mean_s: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def drawn(rng: random.Random) -> "Trouble":
        """A random subset of all troubles at random rates, so that some runs are rare mixtures (swarm testing)."""
        kinds = [kind for kind in STRIKES if rng.random() < 0.4]
        return Trouble(
            loss=rng.choice((0.0, 0.02, 0.1)),
            duplicate=rng.choice((0.0, 0.05, 0.2)),
            slow=rng.choice((0.0, 0.03, 0.15)),
            stab=rng.choice((0.0, 0.0, 0.003, 0.01)),
            lasts=rng.random() < 0.5,
            mean_s={kind: rng.choice((2.0, 5.0, 10.0)) for kind in kinds},
        )

    def with_crashes(self, rng: random.Random) -> "Trouble":
        """The same besides a random subset of what a job with checkpoints survives."""
        kinds = [kind for kind in CRASHES if rng.random() < 0.35]
        return replace(self, mean_s=self.mean_s | {kind: rng.choice((3.0, 7.0, 15.0)) for kind in kinds})


CALM = Trouble()


class Troubles:
    """Strikes a world as its `Trouble` says, and stops doing so at `END_S`. `events` counts what was done."""

    def __init__(self, world: "World", trouble: Trouble, rng: random.Random) -> None:
        self.events: Counter[str] = Counter()
        self.weather = Weather(trouble.loss, trouble.duplicate, trouble.slow)
        self._world, self._trouble, self._rng = world, trouble, rng

    @property
    def are_over(self) -> bool:
        return self._world.clock.now_s > END_S

    def begin(self) -> None:
        """Plan the first of each kind, and the end of all."""
        for kind, mean_s in self._trouble.mean_s.items():
            self._plan(kind, mean_s)
        self._world.clock.at(END_S, self._end)

    def stab(self, process: Process) -> None:
        """A process has sent a message; perhaps it is hurt before it sends the next."""
        if not self._trouble.stab or self.are_over or self._rng.random() >= self._trouble.stab:
            return
        self.events["stab"] += 1
        if isinstance(process, Launcher):
            return
        if isinstance(process, TrainerProcess) and self._rng.random() < 0.5:
            self.crash(process)
        elif self._world.launcher is not None and self._rng.random() < 0.5:
            self.kill(process)
        else:
            process.freeze(self.a_while_s())

    def a_while_s(self) -> float:
        """How long something is frozen or cut off."""
        return self._rng.choice((0.3, 1.0, 2.0, LEASE_S + 1.0, LONGEST_S))

    def crash(self, trainer: TrainerProcess) -> None:
        """A trainer is killed; its launcher may see it, and may start another."""
        trainer.stop()
        if self._rng.random() < 0.5:
            self._world.carry("launcher", MASTER, Exited(Request(0), trainer.title, trainer.pid))
        self._restart(trainer)

    def kill(self, process: Process) -> None:
        """A process is killed; its launcher sees it and starts another. What is judged at the end is not lost."""
        if isinstance(process, PserverProcess) and self._world.master_process.master.is_over:
            return
        process.stop()
        self._world.ended(process)

    def leave(self, trainer: TrainerProcess) -> None:
        """A trainer is asked to leave."""
        trainer.leave()
        self._restart(trainer)

    def cut(self) -> None:
        """Some members are cut off from the others, of which there are two at least."""
        names = sorted(self._world.processes)
        members = frozenset(self._rng.sample(names, self._rng.randint(1, len(names) - 1)))
        cut = Cut(members, self._world.clock.now_s + self.a_while_s(), self._rng.random() < 0.3)
        self._world.network.cuts.append(cut)

    def _restart(self, trainer: TrainerProcess) -> None:
        if self._rng.random() < 0.6:
            self._world.clock.at(self._rng.choice((0.1, 1.0, 6.0)), lambda: self._world.spawn(trainer.title))

    def _plan(self, kind: str, mean_s: float) -> None:
        delay_s = self._rng.expovariate(1 / mean_s)
        if self._world.clock.now_s + delay_s < END_S:
            self._world.clock.at(delay_s, lambda: self._strike(kind, mean_s))

    def _strike(self, kind: str, mean_s: float) -> None:
        struck = (STRIKES | CRASHES)[kind](self, self._rng, self._world)
        if struck is not None:
            self.events[kind] += 1
            self._world.say(kind, struck)
        self._plan(kind, mean_s)

    def _end(self) -> None:
        if not self._trouble.lasts:
            self.weather.loss = self.weather.duplicate = self.weather.slow = 0.0


Strike = Callable[[Troubles, random.Random, "World"], str | None]
"""Does something to a world; returns to whom, or None if there was nobody."""


def _to_a_trainer(act: Callable[[Troubles, TrainerProcess], None]) -> Strike:
    def strike(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
        victims = [t for t in world.trainers() if not t.ended and not t.is_leaving]
        if not victims:
            return None
        victim = rng.choice(victims)
        act(troubles, victim)
        return victim.name

    return strike


def _freeze(kind: type[Process]) -> Strike:
    def strike(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
        victims = [p for p in world.processes.values() if isinstance(p, kind)]
        if not victims:
            return None
        victim = rng.choice(victims)
        victim.freeze(troubles.a_while_s())
        return victim.name

    return strike


def _cut(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
    if len(world.processes) < 2:
        return None
    troubles.cut()
    return ", ".join(sorted(world.network.cuts[-1].members))


def _join(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
    return world.spawn() if len(world.trainers()) < MAX_TRAINERS else None


STRIKES: dict[str, Strike] = {
    "crash": _to_a_trainer(Troubles.crash),
    "leave": _to_a_trainer(Troubles.leave),
    "join": _join,
    "cut": _cut,
    "freeze trainer": _freeze(TrainerProcess),
    "freeze pserver": _freeze(PserverProcess),
    "freeze master": _freeze(MasterProcess),
}


def _kill(kind: type[Process]) -> Strike:
    def strike(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
        victims = [p for p in world.processes.values() if isinstance(p, kind)]
        if not victims:
            return None
        victim = rng.choice(victims)
        troubles.kill(victim)
        return victim.name

    return strike


def _kill_all(kinds: tuple[type[Process], ...]) -> Strike:
    def strike(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
        victims = [p for p in world.processes.values() if isinstance(p, kinds)]
        for victim in victims:
            troubles.kill(victim)
        return ", ".join(victim.name for victim in victims) or None

    return strike


def _run_again(troubles: Troubles, rng: random.Random, world: "World") -> str | None:
    if world.plan.scratch is not None or world.master_process.master.is_over:
        return None
    world.begin_again()
    return "all"


def _storage(what: str) -> Strike:
    def strike(troubles: Troubles, rng: random.Random, world: "World") -> str:
        setattr(world.store, what, world.clock.now_s + troubles.a_while_s())
        return "storage"

    return strike


CRASHES: dict[str, Strike] = {
    "crash pserver": _kill(PserverProcess),
    "crash master": _kill(MasterProcess),
    "crash pservers": _kill_all((PserverProcess,)),
    "crash all": _kill_all((PserverProcess, MasterProcess, TrainerProcess)),
    "run again": _run_again,
    "storage away": _storage("away_until_s"),
    "storage full": _storage("full_until_s"),
    "storage slow": _storage("slow_until_s"),
    "record away": _storage("record_away_until_s"),
}
