"""Runs a trainer's flows: the thin loop that sends, waits and receives for them."""

import time
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from evergrad.errors import Unavailable
from evergrad.messages import AnyMessage, Generation, Send, Term
from evergrad.trainer.exchange import Exchange, Flow
from evergrad.trainer.trainer import JobOver
from evergrad.wire.process import Heartbeats, is_orphan

T = TypeVar("T")

TURN_S = 0.1
SILENCE_S = 60.0
"""A master silent for so long is given up."""
LEFT_STATUS = 143
"""The exit status of a trainer that was asked to leave by SIGTERM."""


class Carrier(Protocol):
    """What carries messages: `wire.transport.Network`, or the inside of this process."""

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[tuple[str, AnyMessage]]:
        """Send these, then wait up to `timeout_s` for messages; returns all that are there, with their senders."""

    def close(self) -> None:
        """Let go of everything."""


class Leaving(SystemExit):
    """This process was asked to leave: unwinds the script wherever it next waits for the job."""

    def __init__(self) -> None:
        super().__init__(LEFT_STATUS)


class _Started(Generic[T]):
    """A flow that has been begun, and the rest of it."""

    def __init__(self, flow: Flow[T]) -> None:
        self._flow = flow
        self._result: list[T] = []
        try:
            next(flow)
        except StopIteration as stop:
            self._result.append(stop.value)

    def rest(self) -> Flow[T]:
        """What is left to run."""
        if self._result:
            return self._result[0]
        return (yield from self._flow)


class Driver:
    """Drives flows: one to its end, while others that were started may be on their way.

    Args:
        exchange: where the flows put their requests.
        carrier: what carries them.
    """

    def __init__(self, exchange: Exchange, carrier: Carrier) -> None:
        self.heartbeats: Heartbeats | None = None
        self.is_leaving = False
        self.hear: Callable[[Generation, bool], None] = lambda *_: None
        """Is told the present generation, and whether it is whole ..."""
        self.hear_term: Callable[[Term], None] = lambda _: None
        """... and the term of the master."""
        self._exchange = exchange
        self._carrier = carrier

    def start(self, flow: Flow[T]) -> Flow[T]:
        """Begin a flow and send what it asks; `run` what is returned to have its result."""
        started = _Started(flow)
        if due := self._exchange.due(time.monotonic()):
            for _, message in self._carrier.exchange(due, 0.0):
                self._exchange.receive(message)
        return started.rest()

    def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end.

        Raises:
            Leaving: SIGTERM has come, or the launcher is gone.
            JobOver: the job has ended elsewhere.
            Unavailable: the master has been silent for `SILENCE_S` seconds.
        """
        while True:
            self.check()
            try:
                next(flow)
            except StopIteration as stop:
                result: T = stop.value
                return result
            for _, message in self._carrier.exchange(self._exchange.due(time.monotonic()), TURN_S):
                self._exchange.receive(message)

    def say_goodbye(self, flow: Flow[None], deadline_s: float) -> bool:
        """Run the last flow, for at most `deadline_s` seconds; returns whether it came to its end."""
        end_s = time.monotonic() + deadline_s
        for _ in flow:
            for _, message in self._carrier.exchange(self._exchange.due(time.monotonic()), TURN_S):
                self._exchange.receive(message)
            if time.monotonic() > end_s:
                return False
        return True

    def close(self) -> None:
        """Stop the heartbeats and let go of what carries messages."""
        if self.heartbeats is not None:
            self.heartbeats.close()
        self._carrier.close()

    def check(self) -> None:
        """What `run` does at every turn, for one who computes for long without it: raises as `run`."""
        if self.heartbeats is None:
            return
        if self.is_leaving or is_orphan():
            raise Leaving
        self.heartbeats.turned()
        newest = self.heartbeats.newest
        if newest is not None and newest.over:
            raise JobOver(newest.failure)
        if newest is not None:
            self.hear_term(newest.term)
            self.hear(newest.generation, newest.is_whole)
        if self.heartbeats.silence_s() > SILENCE_S:
            raise Unavailable(f"the master has not answered for {SILENCE_S:.0f} s; look at its log, then run again")
