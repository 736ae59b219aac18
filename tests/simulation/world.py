"""A whole job in one process under a seeded network and a clock of its own.

The master, the pservers and the trainers are the real classes; messages go through the real codec. What is simulated
is the network, the processes' loops, the scripts' arithmetic, and what happens to all of them. Everything that happens
follows from the seed.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from evergrad.master.master import Master
from evergrad.messages import AnyMessage, Message, Place, UpdateName
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.trainer import Trainer

from .faults import Fault, Kind
from .judge import judge
from .launcher import Launcher
from .network import Clock, Network
from .plan import Plan, SavePlan
from .processes import MasterProcess, Process, PserverProcess, TrainerProcess
from .storage import Store, mounted
from .trouble import CALM, END_S, LONGEST_S, MAX_TRAINERS, Trouble, Troubles
from .watch import LOOK_S, Watch

PATIENCE_S = 4.0
"""A launcher that finds no trainer starts one, looking as often as this."""
RECOVERY_S = 100.0
"""A job that makes checkpoints may take so much longer."""


@dataclass(frozen=True)
class Roles:
    """The classes of the roles; a test of the simulation itself puts broken ones in."""

    master: type[Master] = Master
    pserver: type[Pserver] = Pserver
    trainer: type[Trainer] = Trainer


@dataclass(frozen=True)
class Schedule:
    """A run: what is trained, by how many, and what goes wrong."""

    seed: int
    plan: Plan
    pservers: int
    trainers: int
    trouble: Trouble

    @staticmethod
    def drawn(
        seed: int,
        rule: UpdateName | None = None,
        plan: Plan | None = None,
        pservers: int | None = None,
        trouble: Trouble | None = None,
        is_saved: bool | None = None,
    ) -> "Schedule":
        """The schedule of a seed; what is given is not drawn.

        `is_saved`: whether the job makes checkpoints, if its plan does not say how.
        """
        rng, of_recovery = random.Random(f"schedule {seed}"), random.Random(f"recovery {seed}")
        drawn = (
            Plan.drawn(random.Random(f"plan {seed}"), rule),
            rng.choice((1, 2, 2, 3, 4)),
            rng.choice((1, 2, 3, 3, 5)),
            Trouble.drawn(rng),
        )
        saves, of_saved = SavePlan.drawn(of_recovery), of_recovery.random() < 0.5
        plan = plan or drawn[0]
        if plan.checkpoints is None and (of_saved if is_saved is None else is_saved):
            plan = replace(plan, checkpoints=saves)
        hurt = drawn[3].with_crashes(of_recovery) if plan.checkpoints is not None else drawn[3]
        return Schedule(seed, plan, pservers or drawn[1], drawn[2], hurt if trouble is None else trouble)


class World:
    """One run. `faults` lists what was wrong, `events` counts what was done to it."""

    def __init__(self, schedule: Schedule, roles: Roles | None = None) -> None:
        self.schedule, self.plan, self.places = schedule, schedule.plan, schedule.pservers
        self.roles = roles or Roles()
        self.rng = random.Random(f"run {schedule.seed}")
        self.clock = Clock()
        self.faults: list[Fault] = []
        self.trace: list[tuple[float, str, str, str]] = []
        self.processes: dict[str, Process] = {}
        self.trainers_ever = 0
        self.era = 0
        """How often the whole job was killed, with its launcher, and run again."""
        self.watch = Watch(self)
        self.store = Store(self.clock, random.Random(f"storage {schedule.seed}"), self.watch.offered)
        self.troubles = Troubles(self, schedule.trouble, random.Random(f"trouble {schedule.seed}"))
        self.stab = self.troubles.stab
        self.network = Network(self.clock, self.rng, self.troubles.weather, self._deliver, self.troubles.events)
        self._pids = itertools.count(1)
        self.launcher: Launcher | None = None
        if self.plan.checkpoints is not None:
            self.launcher = Launcher(self, random.Random(f"launcher {schedule.seed}"))
        self.master_process = MasterProcess(self)
        self.pservers = [PserverProcess(self, Place(place)) for place in range(self.places)]
        for _ in range(schedule.trainers):
            self.clock.at(self.rng.random() * 2, self.spawn)
        self.clock.at(PATIENCE_S, self._replace_the_last)
        self.clock.at(LOOK_S, self._look)
        self.troubles.begin()
        self.horizon_s = END_S + LONGEST_S + (40.0 + self.plan.work) * (10.0 if schedule.trouble.lasts else 1.0)
        if self.launcher is not None:
            self.horizon_s += RECOVERY_S

    @property
    def events(self) -> Counter[str]:
        return self.troubles.events

    def run(self) -> "World":
        """Run to the end and judge; returns itself."""
        with mounted(self.store.shelf):
            while not self.is_over() and self.clock.now_s < self.horizon_s and not self.faults:
                try:
                    if not self.clock.turn():
                        break
                except Exception as exc:
                    self.fault(Kind.CRASHED, f"{type(exc).__name__}: {exc}")
            if not self.faults:
                judge(self)
        return self

    def is_over(self) -> bool:
        """Whether the job has ended, and everybody has heard of it."""
        return (
            self.master_process.is_alive
            and self.master_process.master.has_ended
            and all(t.ended for t in self.trainers())
            and all(p.is_alive and p.is_over for p in self.pservers)
        )

    # -- processes -----------------------------------------------------------------------------------------------------

    def trainers(self) -> list[TrainerProcess]:
        """The trainers there are."""
        return [p for p in self.processes.values() if isinstance(p, TrainerProcess)]

    def spawn(self, title: str | None = None) -> str | None:
        """Start a trainer, if the job still goes on; returns its name."""
        if self.master_process.master.is_over or len(self.trainers()) >= MAX_TRAINERS:
            return None
        self.trainers_ever += 1
        return TrainerProcess(self, title or f"trainer-{self.trainers_ever}", self.trainers_ever).name

    def begin_master(self) -> None:
        """Start the next master."""
        self.watch.master_begins()
        self.master_process = MasterProcess(self)

    def begin_pserver(self, place: Place) -> None:
        """Start another pserver at its place."""
        self.pservers[place] = PserverProcess(self, place, next(self._pids) + 1)

    def ended(self, process: Process) -> None:
        """A process has ended, and its launcher sees it."""
        if self.launcher is not None:
            self.launcher.ended(process)

    def begin_again(self) -> None:
        """All processes, the launcher too, are killed, and the same job is run anew, as another one."""
        trainers = [t.title for t in self.trainers()]
        for process in list(self.processes.values()):
            process.stop()
        self.era, self.network.era, self.store.record = self.era + 1, self.era + 1, None
        self.watch.begins_again()
        self.launcher = Launcher(self, random.Random(f"launcher {self.schedule.seed} {self.era}"))
        self.begin_master()
        for place in range(self.places):
            self.begin_pserver(Place(place))
        for title in trainers:
            self.clock.at(self.rng.random() * 2, lambda title=title: self.spawn(title))

    def _replace_the_last(self) -> None:
        if not self.trainers():
            self.spawn()
        self.clock.at(PATIENCE_S, self._replace_the_last)

    def _look(self) -> None:
        self.watch.look()
        self.clock.at(LOOK_S, self._look)

    # -- messages ------------------------------------------------------------------------------------------------------

    def carry(self, src: str, to: str, message: Message) -> None:
        """Send a message."""
        frames = self.network.carry(src, to, message)
        self.watch.sent(src, to, message, frames)

    def _deliver(self, src: str, to: str, decode: Callable[[], AnyMessage]) -> None:
        process = self.processes.get(to)
        if process is not None:
            process.arrive(src, decode)

    # -- what happened -------------------------------------------------------------------------------------------------

    def note(self, src: str, to: str, message: AnyMessage) -> None:
        """A message is being dealt with."""
        self.trace.append((self.clock.now_s, src, to, type(message).__name__))

    def say(self, what: str, to: str) -> None:
        """Something happened."""
        self.trace.append((self.clock.now_s, "***", to, what))

    def fault(self, kind: Kind, text: str) -> None:
        """Something is wrong."""
        self.say(f"BROKEN: {kind}", text)
        self.faults.append(Fault(kind, text))

    def report(self, lines: int | None = 40) -> str:
        """The schedule, what happened last (`lines` None: all of it) and what went wrong."""
        trace = self.trace if lines is None else self.trace[-lines:]
        told = [f"{at:9.4f} {src} -> {to}  {what}" for at, src, to, what in trace]
        again = f"python tools/simulate.py --seed {self.schedule.seed} --rule {self.plan.update.name} --trace"
        return "\n".join([str(self.schedule), *told, *map(str, self.faults), f"again, if its plan was drawn: {again}"])


__all__ = ["CALM", "Roles", "Schedule", "Trouble", "World"]
