"""A whole job inside this process: the same role classes, handed each other's messages without sockets.

What a job of processes has threads for, reading and writing checkpoints, has the same threads here; they are looked
after whenever the script asks the job for something.
"""

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from weakref import finalize, ref

from evergrad.errors import InvariantError
from evergrad.kernels.warm import warm
from evergrad.master.clerk import Clerk
from evergrad.master.master import Master
from evergrad.master.settings import Settings
from evergrad.messages import (
    GRACE_S,
    Address,
    AnyMessage,
    Ask,
    BreakDone,
    Join,
    Member,
    Message,
    Place,
    Request,
    Role,
    Send,
    StopJob,
    WantEnd,
)
from evergrad.pserver.background import Saver
from evergrad.pserver.between import LOOK_S, Between
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.cutting import MESSAGE_BYTES, PIECE_BYTES
from evergrad.trainer.driver import Driver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import Identity, Trainer

log = logging.getLogger("evergrad.job")

MASTER = Address("local://master")
TRAINER = "trainer"
SHARE = 0.05
"""So much of the time of a script that trains goes into copying what is to be saved."""
PATIENCE_S = 10.0
"""When nothing has come for so long though no file is being written or read, nothing will."""
LAST = Request(1 << 62)
"""The number of the last request: greater than all others."""

Handle = Callable[[str, AnyMessage], list[Send]]


class LocalNetwork:
    """Carries messages between one trainer, a master and pservers that all live in this process.

    No lease runs out here.

    Args:
        pservers: how many.
        clock: seconds, counted from anywhere.
    """

    def __init__(self, pservers: int, clock: Callable[[], float] = time.monotonic) -> None:
        warm()
        self._clock = clock
        name = f"embedded-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        self.master = Master(Settings(name, pservers, lease_s=inf))
        self._roles: dict[str, Handle] = {MASTER: lambda src, message: self.master.handle(src, message, self._clock())}
        self._queue: deque[tuple[str, str, Message]] = deque()
        self._clerk = Clerk(None)
        self._between: dict[str, Between] = {}
        self._left_s = self._clock()
        for place in range(pservers):
            name, address = f"pserver-{place}", Address(f"local://pserver-{place}")
            pserver = Pserver(Member(name))
            self._roles[address] = pserver.handle
            self._between[address] = Between(pserver, Saver())
            join = Join(Request(1), Role.PSERVER, pserver.member, name, 0, place=Place(place), address=address)
            self._queue.append((address, MASTER, join))
        self._finalize = finalize(self, _close, self._clerk, tuple(self._between.values()))
        self._carry()

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[tuple[str, AnyMessage]]:
        """Hand everything on until only messages for the trainer are left; those are returned.

        Raises:
            InvariantError: nothing comes and nothing ever will.
        """
        self._queue.extend((TRAINER, send.to, send.message) for send in sends)
        now_s = self._clock()
        received = self._turn(SHARE * (now_s - self._left_s))
        moved_s = now_s
        while not received:
            if self._is_busy:
                moved_s = self._clock()
            elif self._clock() - moved_s > PATIENCE_S:
                waiting_for = self.master.status(Request(0), moved_s).waiting_for
                raise InvariantError(
                    f"the embedded job waits for something that cannot come ({waiting_for}); report this bug"
                )
            received = self._wait()
        self._left_s = self._clock()
        return received

    def stop(self, last: Ask) -> None:
        """End the job, after one more checkpoint if it makes any and something has been trained since the last.

        Args:
            last: what the script has still to say.
        """
        self._queue += [(TRAINER, MASTER, last), (TRAINER, MASTER, StopJob(Request(0), None, GRACE_S))]
        self._turn(inf)
        while not self.master.is_over:
            self._wait()

    def close(self) -> None:
        """End the threads. It is done, too, when nobody holds this any more."""
        self._finalize()

    @property
    def _is_busy(self) -> bool:
        """Whether files are being written or read."""
        return self._clerk.is_busy or any(between.is_busy for between in self._between.values())

    def _wait(self) -> list[tuple[str, AnyMessage]]:
        """Let time pass."""
        time.sleep(LOOK_S)
        self._queue.extend((MASTER, send.to, send.message) for send in self.master.tick(self._clock()))
        return self._turn(inf)

    def _turn(self, budget_s: float) -> list[tuple[str, AnyMessage]]:
        """Hand on what there is, then look after files, for about so long."""
        received = self._carry()
        for address, between in self._between.items():
            began_s = now_s = self._clock()
            wait_s: float | None = 0.0
            while wait_s == 0.0 and now_s - began_s <= budget_s:
                sends, wait_s = between.work(now_s)
                self._queue.extend((address, send.to, send.message) for send in sends)
                now_s = self._clock()
        received += self._carry()
        sends = self._clerk.run(self.master, self._clock())
        self._queue.extend((MASTER, send.to, send.message) for send in sends)
        for event in self.master.take_events():
            log.log(logging.WARNING if event.is_trouble else logging.INFO, "job.event %s", event.text)
        return received + self._carry()

    def _carry(self) -> list[tuple[str, AnyMessage]]:
        received: list[tuple[str, AnyMessage]] = []
        while self._queue:
            src, to, message = self._queue.popleft()
            handle = self._roles.get(to)
            if handle is not None:
                self._queue.extend((to, send.to, send.message) for send in handle(src, message))  # type: ignore[arg-type]
            elif to == TRAINER:
                received.append((src, message))  # type: ignore[arg-type]
        return received


def _close(clerk: Clerk, between: Sequence[Between]) -> None:
    clerk.close()
    for each in between:
        each.close()


def embedded_session(pservers: int = 1, message_bytes: int = MESSAGE_BYTES, piece_bytes: int = PIECE_BYTES) -> Session:
    """A job inside this process with so many pservers, its one trainer, and messages of about this size at most."""
    exchange, network = Exchange(), LocalNetwork(pservers)
    identity = Identity("trainer-0", os.getpid(), "")
    trainer = Trainer(exchange, MASTER, identity, lambda: Member("trainer-0"), message_bytes, piece_bytes)
    driver = Driver(exchange, network)
    driver.run(trainer.join())
    session = Session(trainer, driver)
    atexit.register(_stop, ref(session), ref(network))
    return session


def _stop(session: "ref[Session]", network: "ref[LocalNetwork]") -> None:
    """The interpreter ends: what is trained goes into a checkpoint."""
    held, there = session(), network()
    if held is None or there is None:
        return
    done = held.done
    if isinstance(done, BreakDone):  # an exception leaves the loops too, and is no `break`
        done = done.last
    there.stop(Ask(LAST, held.trainer.member, WantEnd(), done))
