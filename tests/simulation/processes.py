"""The processes of a simulated job: the real roles, each with a loop as its process has."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from evergrad.checkpoint.pieces import Piece
from evergrad.errors import EvergradError
from evergrad.master.record import decode
from evergrad.master.settings import Settings
from evergrad.messages import (
    Address,
    AnyMessage,
    Ended,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Member,
    Message,
    Place,
    Refused,
    Request,
    Restore,
    Role,
    Send,
    Term,
    Unknown,
)
from evergrad.pserver.between import LOOK_S, Between
from evergrad.pserver.model import Model
from evergrad.pserver.pserver import OfModel, Pserver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.trainer import Identity, JobOver, MustStartAgain

from .faults import Kind
from .script import Script
from .threads import Clerk, Loader, Saver

if TYPE_CHECKING:
    from .world import World

MASTER = Address("sim://master")
LEASE_S, TICK_S, RESEND_S, BEAT_S, TURN_S, GOODBYE_S = 5.0, 0.2, 0.5, 1.0, 0.25, 2.0
MEAN_COMPUTE_S = 0.2
RESTART_S = 0.5
"""After this a process whose script has raised is started again."""
SLICES_BYTES = (100, 400, 1 << 19)
"""So much of a cut is copied at once ..."""
LONGEST_SLICE_S = 0.004
"""... in up to this."""


class Process:
    """Something that runs: it takes messages, and can be frozen and stopped.

    `inbox` counts the messages that wait until it thaws.
    """

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.is_alive, self.frozen_until_s, self.inbox = True, 0.0, 0
        world.processes[name] = self

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Act after a while; a frozen process acts when it has thawed, a dead one never."""
        self.world.clock.at(delay_s, lambda: self._act(act))

    def every(self, period_s: float, act: Callable[[], None]) -> None:
        """Act now and then."""

        def again() -> None:
            act()
            self.later(period_s, again)

        self.later(self.world.rng.random() * period_s, again)

    def freeze(self, seconds: float) -> None:
        """As after SIGSTOP, until SIGCONT."""
        self.frozen_until_s = max(self.frozen_until_s, self.world.clock.now_s + seconds)

    @property
    def is_frozen(self) -> bool:
        return self.frozen_until_s > self.world.clock.now_s

    def stop(self) -> None:
        """The process is gone."""
        self.is_alive = False
        self.world.processes.pop(self.name, None)

    def send(self, sends: list[Send]) -> None:
        """Send these, one after the other; between two of them the process may be hurt."""
        for to, message in sends:
            if not self.is_alive:
                return
            self._act(lambda to=to, message=message: self.world.carry(self.name, to, message))
            self.world.stab(self)

    def arrive(self, src: str, decode: Callable[[], AnyMessage]) -> None:
        """A message has come to the process's door."""
        if not self.is_frozen:
            self._receive(src, decode())
            return
        self.inbox += 1

        def thawed() -> None:
            self.inbox -= 1
            self._receive(src, decode())

        self.later(self.frozen_until_s - self.world.clock.now_s, thawed)

    def _act(self, act: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_frozen:
            self.later(self.frozen_until_s - self.world.clock.now_s, act)
        else:
            act()

    def _receive(self, src: str, message: AnyMessage) -> None:
        self.world.note(src, self.name, message)
        self.receive(src, message)

    def receive(self, src: str, message: AnyMessage) -> None:
        """Deal with a message."""
        raise NotImplementedError


class MasterProcess(Process):
    """A master: the first of its job, or one that goes on from the record."""

    def __init__(self, world: "World") -> None:
        super().__init__(world, MASTER)
        plan, data = world.plan, world.store.record
        job, is_kept = f"simulation {world.era}", plan.checkpoints is not None
        settings = Settings(job, world.places, LEASE_S, scratch=plan.scratch, keeps_record=is_kept)
        record = decode(data) if data is not None else None
        of_record = () if record is None else (Term(record.term + 1), record)
        self.master = world.roles.master(settings, *of_record)
        self.clerk = Clerk(self, world.store, self._turn, world.rng)
        self.every(TICK_S, self._tick)

    def stop(self) -> None:
        super().stop()
        self.world.watch.moments.stopped(self.master)
        self.clerk.tear()

    def _tick(self) -> None:
        self.send(self.master.tick(self.world.clock.now_s))
        self._turn()
        self.master.take_events()

    def _turn(self) -> None:
        self.send(self.clerk.run(self.master, self.world.clock.now_s))

    def receive(self, src: str, message: AnyMessage) -> None:
        self.world.watch.heard(src)
        now_s = self.world.clock.now_s
        self.send(self.master.handle(src, message, now_s) + self.clerk.run(self.master, now_s))


class _Slices:
    """A pserver whose cuts are copied in slices of a few rows."""

    def __init__(self, pserver: Pserver, slice_bytes: int) -> None:
        self._pserver, self._slice_bytes = pserver, slice_bytes

    def __getattr__(self, name: str) -> object:
        return getattr(self._pserver, name)

    def next_piece(self, _: int) -> Piece | None:
        return self._pserver.next_piece(self._slice_bytes)


class PserverProcess(Process):
    """A pserver, the `pid`-th process at its place."""

    def __init__(self, world: "World", place: Place, pid: int = 1) -> None:
        super().__init__(world, f"sim://pserver-{place}.{world.era}.{pid}")
        self.place, self.pid = place, pid
        self.pserver = world.roles.pserver(Member(f"pserver-{place}.{world.era}.{pid}"))
        self.saver = Saver(self, world.store, self._work)
        sliced = _Slices(self.pserver, world.rng.choice(SLICES_BYTES))
        self.between = Between(sliced, self.saver, self._load, self._clock, processors=2)
        self._joined = self._is_waiting = self._is_told = False
        self._term = Term(0)
        world.watch.begins(self)
        self.every(BEAT_S, self._beat)
        if world.plan.checkpoints is not None:
            self.every(RESEND_S, self._tick)

    @property
    def model(self) -> Model:
        """What it holds."""
        held = self.pserver._held
        assert held is not None
        return held[0]

    @property
    def is_over(self) -> bool:
        """Whether it knows that the job has ended."""
        return self.pserver.is_over or self._is_told

    def stop(self) -> None:
        super().stop()
        self.saver.tear()

    def _beat(self) -> None:
        member, address = self.pserver.member, Address(self.name)
        if self._joined:
            beat: Message = Heartbeat(Request(1), member, 0.0)
        else:
            name = f"pserver-{self.place}"
            beat = Join(Request(1), Role.PSERVER, member, name, self.pid, place=self.place, address=address)
        self.send([Send(MASTER, beat)])

    def _tick(self) -> None:
        self.send(self.pserver.resend())
        self._work()

    def _clock(self) -> float:
        """Copying a slice takes a moment."""
        return self.world.clock.now_s + self.world.rng.random() * LONGEST_SLICE_S

    def _load(self, restore: Restore) -> Loader:
        return Loader(self, self.world.store, self._work, restore)

    def _work(self) -> None:
        """Copy, hand over and take pieces, until the loop waits for a message or for a while."""
        wait_s: float | None = 0.0
        while self.is_alive and wait_s == 0.0:
            sends, wait_s = self.between.work(self.world.clock.now_s)
            self.world.watch.worked(self)
            self.send(sends)
        if wait_s and wait_s != LOOK_S and not self._is_waiting:  # who is looked for calls
            self._is_waiting = True
            self.later(wait_s, self._waited)

    def _waited(self) -> None:
        self._is_waiting = False
        self._work()

    def receive(self, src: str, message: AnyMessage) -> None:
        match message:
            case Joined():
                self._joined = True
            case HeartbeatReply():
                self._heard(message)
            case Ended():
                self._is_told = True
            case Unknown() | Refused():  # as after a sentence and with another status
                self._end()
            case _:
                if isinstance(message, OfModel):
                    self.between.asked(self.world.clock.now_s)
                sends = self.pserver.handle(src, message)
                self.world.watch.handled(self, message, sends)
                self.send(sends)
                if self.between.is_busy:
                    self._work()

    def _heard(self, reply: HeartbeatReply) -> None:
        if reply.term >= self._term:
            self._term, self._is_told = reply.term, self._is_told or reply.over
            if not reply.known and not reply.over:
                self._end()

    def _end(self) -> None:
        self.stop()
        self.world.ended(self)


class TrainerProcess(Process):
    """A trainer that runs the script. `title` is what people call it; a restarted one has the title of the old one."""

    def __init__(self, world: "World", title: str, pid: int) -> None:
        super().__init__(world, f"{title}/{pid}")
        self.title, self.pid, self.ended = title, pid, False
        self.is_leaving = False
        self._term = Term(0)
        self._incarnations = itertools.count(1)
        self._mean_s = MEAN_COMPUTE_S * world.rng.choice((0.2, 1, 1, 1, 6))
        self.exchange = Exchange()
        identity = Identity(title, pid, "")
        self.trainer = world.roles.trainer(self.exchange, MASTER, identity, self._incarnation, world.plan.message_bytes)
        self._flow = Script(world.plan, self.trainer, self._compute, world.watch, pid).run()
        self.later(world.rng.random() * TURN_S, self._turn)
        self.every(TURN_S, self._resend)
        self.every(BEAT_S, self._beat)

    def _incarnation(self) -> Member:
        return Member(f"{self.name}.{next(self._incarnations)}")

    def _compute(self):
        is_ready = False

        def ready() -> None:
            nonlocal is_ready
            is_ready = True
            self._turn()

        self.later(self.world.rng.expovariate(1 / self._mean_s), ready)
        while not is_ready:
            yield

    def _beat(self) -> None:
        if not self.ended:
            self.send([Send(MASTER, Heartbeat(Request(0), self.trainer.member, 0.0))])

    def _resend(self) -> None:
        if not self.ended:
            self.send(self.exchange.due(self.world.clock.now_s))

    def _turn(self) -> None:
        if self.ended:
            return
        try:
            next(self._flow)
        except JobOver as over:
            self._end(over.failure)
        except MustStartAgain:
            self.world.events["started again"] += 1
            self.leave()
            self.world.clock.at(GOODBYE_S + RESTART_S, lambda: self.world.spawn(self.title))
        except StopIteration as stop:
            self.stop()
            if stop.value:
                self.world.clock.at(RESTART_S, lambda: self.world.spawn(self.title))
        except EvergradError as exc:
            self._end(f"{type(exc).__name__}: {exc}")
        else:
            self._resend()

    def _end(self, failure: str | None) -> None:
        self.ended = True
        if failure is not None and not self.world.plan.raises:
            self.world.fault(Kind.FAILED, f"{self.name} ended with {failure}")

    def leave(self) -> None:
        """As after SIGTERM: the script is unwound, a goodbye is tried for a while."""
        self.is_leaving = True
        self._flow.close()
        self._flow = self.trainer.leave(None)
        self.later(GOODBYE_S, self.stop)

    def stop(self) -> None:
        super().stop()
        self._flow.close()

    def receive(self, src: str, message: AnyMessage) -> None:
        if isinstance(message, HeartbeatReply):
            if message.over:
                self._end(message.failure)
            if message.term >= self._term:
                self.trainer.hear_term(message.term)
                self.trainer.hear(message.generation, message.is_whole)
                self._term = message.term
        else:
            self.exchange.receive(message)
        self._turn()
