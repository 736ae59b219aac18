"""The processes of a simulated job: the real roles, each with a loop as its process has."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from evergrad.errors import EvergradError
from evergrad.master.settings import Settings
from evergrad.messages import (
    Address,
    AnyMessage,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Member,
    Message,
    Place,
    Request,
    Role,
    Send,
)
from evergrad.pserver.model import Model
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.trainer import Identity, JobOver

from .faults import Kind
from .script import Script

if TYPE_CHECKING:
    from .world import World

MASTER = Address("sim://master")
LEASE_S, TICK_S, BEAT_S, TURN_S, GOODBYE_S = 5.0, 0.2, 1.0, 0.25, 2.0
MEAN_COMPUTE_S = 0.2
RESTART_S = 0.5
"""After this a process whose script has raised is started again."""


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
    """The master, and the launcher's eye on it."""

    def __init__(self, world: "World", pservers: int) -> None:
        super().__init__(world, MASTER)
        self.master = world.roles.master(Settings("simulation", pservers, LEASE_S))
        self.every(TICK_S, self._tick)

    def _tick(self) -> None:
        self.send(self.master.tick(self.world.clock.now_s))
        self.master.take_events()

    def receive(self, src: str, message: AnyMessage) -> None:
        self.world.watch.heard(src)
        self.send(self.master.handle(src, message, self.world.clock.now_s))


class PserverProcess(Process):
    """A pserver."""

    def __init__(self, world: "World", place: Place, incarnation: int = 1) -> None:
        super().__init__(world, f"sim://pserver-{place}")
        self.place = place
        self.pserver = world.roles.pserver(Member(f"pserver-{place}.{incarnation}"))
        self._joined = False
        self.every(BEAT_S, self._beat)

    @property
    def model(self) -> Model:
        """What it holds."""
        held = self.pserver._held
        assert held is not None
        return held[0]

    def _beat(self) -> None:
        member, address = self.pserver.member, Address(self.name)
        if self._joined:
            beat: Message = Heartbeat(Request(1), member, 0.0)
        else:
            beat = Join(Request(1), Role.PSERVER, member, f"pserver-{self.place}", 0, "", self.place, address)
        self.send([Send(MASTER, beat)])

    def receive(self, src: str, message: AnyMessage) -> None:
        if isinstance(message, Joined):
            self._joined = True
        elif not isinstance(message, HeartbeatReply):
            sends = self.pserver.handle(src, message)
            self.world.watch.handled(self, message, sends)
            self.send(sends)


class TrainerProcess(Process):
    """A trainer that runs the script. `title` is what people call it; a restarted one has the title of the old one."""

    def __init__(self, world: "World", title: str, pid: int) -> None:
        super().__init__(world, f"{title}/{pid}")
        self.title, self.pid, self.ended = title, pid, False
        self.is_leaving = False
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
            self.trainer.hear(message.generation, message.is_whole)
            return
        self.exchange.receive(message)
        self._turn()
