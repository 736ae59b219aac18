"""A whole job in one process under a seeded network and a clock of its own.

The master, the pservers and the trainers are the real classes; messages go through the real codec. What is simulated
is the network (loss, delay, duplication, reordering), the processes' loops, and what happens to the trainers: they
crash, freeze past their lease and come back, leave, and join. Everything that happens follows from the seed.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from evergrad.errors import EvergradError
from evergrad.master.master import Master
from evergrad.master.settings import Settings
from evergrad.messages import (
    NEWEST,
    Address,
    Attempt,
    Commit,
    Committed,
    Exited,
    Export,
    ExportPart,
    Generation,
    GroupSpan,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Member,
    Message,
    Place,
    Pull,
    Request,
    Role,
    Send,
)
from evergrad.placement import slots_owned, span_owned
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.trainer import Identity, JobOver, Trainer
from evergrad.wire.codec import Codec

from .script import APPLIED, COUNTS, PARTS, USERS, Plan, Script, count_key, initial_values

MASTER = Address("sim://master")
LEASE_S, TICK_S, BEAT_S, TURN_S, GOODBYE_S = 5.0, 0.1, 0.5, 0.25, 2.0
FAULTS_END_S, HORIZON_S = 20.0, 300.0
MAX_TRAINERS = 6
PATIENCE_S = 4.0
"""A launcher that finds no trainer starts one, looking as often as this."""


@dataclass(frozen=True)
class Trouble:
    """What may go wrong. `mean_s`: mean seconds between two events of each kind that occurs."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    mean_s: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def drawn(rng: random.Random) -> "Trouble":
        """A random subset of all troubles at random rates, so that some runs are rare mixtures (swarm testing)."""
        kinds = [kind for kind in ("crash", "freeze", "leave", "join") if rng.random() < 0.6]
        return Trouble(
            loss=rng.choice((0.0, 0.02, 0.1)),
            duplicate=rng.choice((0.0, 0.05, 0.2)),
            slow=rng.choice((0.0, 0.03, 0.15)),
            mean_s={kind: rng.choice((1.0, 2.0, 5.0)) for kind in kinds},
        )


CALM = Trouble()


@dataclass(frozen=True)
class Roles:
    """The classes of the roles; a test of the simulation itself puts broken ones in."""

    master: type[Master] = Master
    pserver: type[Pserver] = Pserver
    trainer: type[Trainer] = Trainer


class Process:
    """Something that runs: it takes messages and can be frozen."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.is_alive, self.frozen_until_s = True, 0.0
        world.processes[name] = self

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Act after a while; a frozen process acts when it has thawed, a dead one never."""
        self.world.at(delay_s, lambda: self._act(act))

    def _act(self, act: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.frozen_until_s > self.world.now_s:
            self.later(self.frozen_until_s - self.world.now_s, act)
            return
        act()

    def every(self, period_s: float, act: Callable[[], None]) -> None:
        """Act now and again."""
        act()
        self.later(period_s, lambda: self.every(period_s, act))

    def send(self, sends: list[Send]) -> None:
        for send in sends:
            self.world.carry(self.name, send.to, send.message)

    def receive(self, src: str, message: Message) -> None:
        raise NotImplementedError


class MasterProcess(Process):
    def __init__(self, world: "World", pservers: int) -> None:
        super().__init__(world, MASTER)
        self.master = world.roles.master(Settings("simulation", pservers, LEASE_S))
        self.every(TICK_S, lambda: self.send(self.master.tick(world.now_s)))

    def receive(self, src: str, message: Message) -> None:
        self.send(self.master.handle(src, message, self.world.now_s))


class PserverProcess(Process):
    def __init__(self, world: "World", place: int) -> None:
        super().__init__(world, f"sim://pserver-{place}")
        self.place = Place(place)
        self.pserver = world.roles.pserver(Member(f"pserver-{place}.1"))
        self._joined = False
        self.every(BEAT_S, self._beat)

    def _beat(self) -> None:
        member, address = self.pserver.member, Address(self.name)
        if self._joined:
            beat: Message = Heartbeat(Request(1), member, 0.0)
        else:
            beat = Join(Request(1), Role.PSERVER, member, f"pserver-{self.place}", 0, "", self.place, address)
        self.world.carry(self.name, MASTER, beat)

    def receive(self, src: str, message: Message) -> None:
        if isinstance(message, Joined):
            self._joined = True
        elif not isinstance(message, HeartbeatReply):
            sends = self.pserver.handle(src, message)
            if isinstance(message, Commit) and any(isinstance(s.message, Committed) for s in sends):
                self.world.note_commit(self.place, message)
            self.send(sends)


class TrainerProcess(Process):
    def __init__(self, world: "World", name: str, pid: int) -> None:
        super().__init__(world, name)
        self.pid, self.ended = pid, False
        self._incarnations = itertools.count(1)
        self._exchange = Exchange()
        self._trainer = world.roles.trainer(self._exchange, MASTER, Identity(name, pid, ""), self._incarnation)
        script = Script(
            world.plan, self._trainer, self._compute, world.note_pushed, world.note_saved, world.note_totals
        )
        self._flow = script.run()
        self.every(TURN_S, self._turn)
        self.every(BEAT_S, self._beat)

    def _incarnation(self) -> Member:
        return Member(f"{self.name}.{next(self._incarnations)}")

    def _compute(self):
        ready_s = self.world.now_s + self.world.rng.expovariate(1 / 0.2)
        self.later(ready_s - self.world.now_s, self._turn)
        while self.world.now_s < ready_s:
            yield

    def _beat(self) -> None:
        if not self.ended:
            self.world.carry(self.name, MASTER, Heartbeat(Request(0), self._trainer.member, 0.0))

    def _turn(self) -> None:
        if self.ended:
            return
        try:
            next(self._flow)
        except JobOver as over:
            self._end(over.failure)
        except StopIteration:
            self.stop()
        except EvergradError as exc:
            self._end(f"{type(exc).__name__}: {exc}")
        else:
            self.send(self._exchange.due(self.world.now_s))

    def _end(self, failure: str | None) -> None:
        self.ended = True
        if failure is not None:
            self.world.fault(f"{self.name} ended with {failure}")

    def leave(self) -> None:
        """As after SIGTERM: the script is unwound, a goodbye is tried for a while."""
        self._flow.close()
        self._flow = self._trainer.leave(None)
        self.later(GOODBYE_S, self.stop)

    def stop(self) -> None:
        """The process is gone."""
        self.is_alive = False
        self._flow.close()
        self.world.processes.pop(self.name, None)

    def receive(self, src: str, message: Message) -> None:
        if isinstance(message, HeartbeatReply):
            if message.over:
                self._end(message.failure)
            self._trainer.hear(message.generation)
            return
        self._exchange.receive(message)
        self._turn()


class World:
    """One run. `faults` lists the promises that were broken."""

    def __init__(
        self, plan: Plan, seed: int, pservers: int = 1, trouble: Trouble | None = None, roles: Roles | None = None
    ) -> None:
        self.plan, self.seed, self.rng, self.roles = plan, seed, random.Random(seed), roles or Roles()
        self.trouble = Trouble.drawn(self.rng) if trouble is None else trouble
        self.now_s = 0.0
        self.faults: list[str] = []
        self.events: Counter[str] = Counter()
        self.trace: list[str] = []
        self.processes: dict[str, Process] = {}
        self.models: list[dict] = []
        self.totals: dict[int, list[float]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._codec = Codec("simulation")
        self._commits: dict[tuple[int, int], tuple[tuple[int, Attempt], ...]] = {}
        self._samples: dict[Attempt, tuple[int, np.ndarray]] = {}
        self._pids = itertools.count(1)
        self.master = MasterProcess(self, pservers).master
        self.pservers = [PserverProcess(self, place) for place in range(pservers)]
        for _ in range(1 if trouble == CALM else self.rng.choice((1, 2, 3, 5))):
            self.at(self.rng.random() * 2, self.spawn)
        self.at(PATIENCE_S, self._replace_the_last)
        for kind, mean_s in self.trouble.mean_s.items():
            self._plan_trouble(kind, mean_s)

    # -- time and network ----------------------------------------------------------------------------------------------

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), act))

    def carry(self, src: str, to: str, message: Message) -> None:
        """Send a message, as the network of this run does."""
        frames = [bytes(frame) for frame in self._codec.encode(message)]
        for _ in range(1 + (self.rng.random() < self.trouble.duplicate)):
            if self.rng.random() < self.trouble.loss:
                self.events["lost"] += 1
                continue
            delay_s = self.rng.expovariate(1 / 0.02)
            if self.rng.random() < self.trouble.slow:
                delay_s += self.rng.expovariate(1 / 1.5)
            self.at(delay_s, lambda: self._deliver(src, to, frames))

    def _deliver(self, src: str, to: str, frames: list[bytes]) -> None:
        process = self.processes.get(to)
        if process is not None:
            process._act(lambda: self._hand_over(process, src, frames))

    def _hand_over(self, process: Process, src: str, frames: list[bytes]) -> None:
        message = self._codec.decode(frames)
        self.trace.append(f"{self.now_s:9.4f} {src} -> {process.name} {type(message).__name__}")
        process.receive(src, message)

    def run(self) -> "World":
        """Run to the end and judge; returns itself."""
        self.run_unjudged()
        if not self.faults:
            self._judge()
        return self

    def run_unjudged(self) -> None:
        """Run until the job is over or time is up."""
        while self._queue and not self._is_over() and self.now_s < HORIZON_S and len(self.faults) < 3:
            self.now_s, _, act = heapq.heappop(self._queue)
            try:
                act()
            except Exception as exc:
                self.fault(f"an exception ended a process: {type(exc).__name__}: {exc}")

    def trainers(self) -> list[TrainerProcess]:
        return [p for p in self.processes.values() if isinstance(p, TrainerProcess)]

    def _is_over(self) -> bool:
        return (
            self.master.is_over
            and all(t.ended for t in self.trainers())
            and all(p.pserver.is_over for p in self.pservers)
        )

    # -- trouble -------------------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        if not self.master.is_over and len(self.trainers()) < MAX_TRAINERS:
            pid = next(self._pids)
            TrainerProcess(self, f"trainer-{pid}", pid)

    def _replace_the_last(self) -> None:
        if not self.trainers():
            self.spawn()
        self.at(PATIENCE_S, self._replace_the_last)

    def _plan_trouble(self, kind: str, mean_s: float) -> None:
        delay_s = self.rng.expovariate(1 / mean_s)
        if self.now_s + delay_s < FAULTS_END_S:
            self.at(delay_s, lambda: self._strike(kind, mean_s))

    def _strike(self, kind: str, mean_s: float) -> None:
        trainers = [t for t in self.trainers() if not t.ended]
        if kind == "join":
            self.spawn()
        elif trainers:
            victim = self.rng.choice(trainers)
            self.trace.append(f"{self.now_s:9.4f} {kind} {victim.name}")
            if kind == "freeze":
                victim.frozen_until_s = self.now_s + self.rng.choice((0.5, 3.0, LEASE_S + 3.0))
            else:
                self._end_trainer(victim, kind)
        self.events[kind] += 1
        self._plan_trouble(kind, mean_s)

    def _end_trainer(self, victim: TrainerProcess, kind: str) -> None:
        if kind == "leave":
            victim.leave()
        else:
            victim.stop()
            if self.rng.random() < 0.5:
                self.carry("launcher", MASTER, Exited(Request(0), victim.name, victim.pid))
        if self.rng.random() < 0.6:
            self.at(self.rng.choice((0.1, 1.0, 6.0)), self.spawn)

    # -- what was promised ---------------------------------------------------------------------------------------------

    def fault(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} BROKEN: {text}")
        self.faults.append(text)

    def note_commit(self, place: Place, commit: Commit) -> None:
        if self._commits.setdefault((place, commit.step), commit.chosen) != commit.chosen:
            self.fault(f"step {commit.step} was committed in two ways at place {place}")

    def note_pushed(self, attempt: Attempt, epoch: int, ids: np.ndarray) -> None:
        self._samples[attempt] = (epoch, ids)

    def note_saved(self, model: dict) -> None:
        self.models.append(model)

    def note_totals(self, epoch: int, totals: list[float]) -> None:
        if self.totals.setdefault(epoch, totals) != totals:
            self.fault(f"two totals for the evaluation of epoch {epoch}")

    def _judge(self) -> None:
        if not self._is_over():
            status = self.master.status(Request(0), self.now_s)
            self.fault(f"the job does not end (master is_over={self.master.is_over}, waits for {status.waiting_for!r})")
            return
        if self.master.failure is not None:
            self.fault(f"the job failed: {self.master.failure}")
            return
        if not self.models:
            self.fault("no model was saved")
            return
        if any(model != self.final() for model in self.models):
            self.fault("a saved model is not the final one")
        if self.plan.is_sync:
            self._judge_sync()
        else:
            self._judge_async()

    def _judge_sync(self) -> None:
        steps = {place: sorted(s for p, s in self._commits if p == place) for place in range(len(self.pservers))}
        if any(s != list(range(-1, max(s) + 1)) or s != steps[0] for s in steps.values()):
            self.fault("the pservers did not apply the same steps, one after the other")
        for place, step in self._commits:
            if self._commits[place, step] != self._commits[0, step]:
                self.fault(f"step {step} was applied differently on two pservers")
        seen = Counter(
            (self._samples[attempt][0], sample)
            for (place, step), chosen in self._commits.items()
            if place == 0 and step >= 0
            for _, attempt in chosen
            for sample in self._samples[attempt][1].tolist()
        )
        whole = [e for e in range(self.plan.epochs) if self.plan.break_at is None or self.plan.break_at[0] != e]
        missing = any(seen[e, s] != 1 for e in whole for s in range(self.plan.samples)) and not self.plan.skips
        if missing or max(seen.values()) > 1:
            self.fault("a sample was not trained exactly once in an epoch")
        reference = fault_free(self.plan)
        if self.final() != reference.final():
            self.fault("the final model differs from that of the run without faults")
        if any(reference.totals[epoch] != totals for epoch, totals in self.totals.items()):
            self.fault("an evaluation differs from that of the run without faults")

    def _judge_async(self) -> None:
        final = self.final()
        applied = np.frombuffer(final[APPLIED], np.float32) - initial_values(self.plan.schema)[APPLIED].values
        if set(applied.tolist()) != {float(self.plan.batches())}:
            self.fault(f"of {self.plan.batches()} batches the elements of the dense parameters had {applied.tolist()}")
        keys = np.frombuffer(final[COUNTS, ExportPart.KEYS], np.int64).tolist()
        counts = np.frombuffer(final[COUNTS, ExportPart.VALUES], np.float32).tolist()
        samples = np.arange(self.plan.samples)
        expected = {key: 1.0 for e in range(self.plan.epochs) for key in count_key(e, samples).tolist()}
        if dict(zip(keys, counts, strict=True)) != expected:
            self.fault("a sample was not trained exactly once in an epoch")

    def final(self) -> dict:
        """The model as the pservers have it, read with messages, in the form in which scripts save it."""
        model: dict = {}
        for table in (USERS, COUNTS):
            for part in PARTS:
                model[table, part] = b"".join(self._piece(p, table, part) for p in self.pservers)
        spans = []
        for place, p in enumerate(self.pservers):
            sizes = [len(span_owned(group.size, place, len(self.pservers))) for group in self.plan.schema.groups]
            groups = tuple(GroupSpan(group, 0, size) for group, size in enumerate(sizes))
            pull = Pull(Request(0), Generation(1), NEWEST, True, (), groups)
            spans.append(p.pserver.handle("judge", pull)[0].message.groups)
        return model | {group: b"".join(of[group].tobytes() for of in spans) for group in range(5)}

    def _piece(self, process: PserverProcess, table: int, part: ExportPart) -> bytes:
        slot = slots_owned(process.place, len(self.pservers)).start
        export = Export(Request(0), Generation(1), NEWEST, table, part, slot, 1 << 30)
        return process.pserver.handle("judge", export)[0].message.part.tobytes()

    def report(self) -> str:
        """What went wrong, and how to see it again."""
        again = f"World({self.plan!r}, seed={self.seed}, pservers={len(self.pservers)}).run()"
        return "\n".join([*self.faults, f"again: {again}", "its end:", *self.trace[-40:]])


@cache
def fault_free(plan: Plan) -> World:
    """The run with one trainer, one pserver and nothing that goes wrong; all others must end with its bits."""
    world = World(plan, seed=0, pservers=1, trouble=CALM)
    world.run_unjudged()
    assert not world.faults, world.report()
    assert world._is_over(), "a job that nothing happens to does not end"
    return world
