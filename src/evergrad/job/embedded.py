"""A whole job inside this process: the same role classes, handed each other's messages without sockets."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from evergrad.errors import InvariantError
from evergrad.kernels.warm import warm
from evergrad.master.master import Master
from evergrad.master.settings import Settings
from evergrad.messages import Address, AnyMessage, Join, Member, Message, Place, Request, Role, Send
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.cutting import MESSAGE_BYTES
from evergrad.trainer.driver import Driver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import Identity, Trainer

MASTER = Address("local://master")
TRAINER = "trainer"

Handle = Callable[[str, AnyMessage], list[Send]]


class LocalNetwork:
    """Carries messages between one trainer, a master and pservers that all live in this process.

    Time is a count of exchanges, so that a run depends on no clock; there is no lease to run out.
    """

    def __init__(self, pservers: int) -> None:
        warm()
        self.master = Master(Settings("embedded", pservers, lease_s=inf))
        self._now_s = 0.0
        self._roles: dict[str, Handle] = {MASTER: lambda src, message: self.master.handle(src, message, self._now_s)}
        self._queue: deque[tuple[str, str, Message]] = deque()
        for place in range(pservers):
            name, address = f"pserver-{place}", Address(f"local://pserver-{place}")
            pserver = Pserver(Member(name))
            self._roles[address] = pserver.handle
            join = Join(Request(1), Role.PSERVER, pserver.member, name, 0, place=Place(place), address=address)
            self._queue.append((address, MASTER, join))
        self._carry()

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[tuple[str, AnyMessage]]:
        """Hand everything on until only messages for the trainer are left; those are returned.

        Raises:
            InvariantError: nothing comes and nothing ever will.
        """
        self._queue.extend((TRAINER, send.to, send.message) for send in sends)
        received = self._carry()
        for _ in range(3):
            if received:
                return received
            self._now_s += 1.0
            self._queue.extend((MASTER, send.to, send.message) for send in self.master.tick(self._now_s))
            received = self._carry()
        if not received:
            waiting_for = self.master.status(Request(0), self._now_s).waiting_for
            raise InvariantError(
                f"the embedded job waits for something that cannot come ({waiting_for}); report this bug"
            )
        return received

    def close(self) -> None:
        """There is nothing to let go of."""

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


def embedded_session(pservers: int = 1, message_bytes: int = MESSAGE_BYTES) -> Session:
    """A job inside this process with so many pservers, its one trainer, and messages of about this size at most."""
    exchange, network = Exchange(), LocalNetwork(pservers)
    identity = Identity("trainer-0", os.getpid(), "")
    trainer = Trainer(exchange, MASTER, identity, lambda: Member("trainer-0"), message_bytes)
    driver = Driver(exchange, network)
    driver.run(trainer.join())
    return Session(trainer, driver)
