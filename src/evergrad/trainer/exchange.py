"""Requests on their way, sent again until they are answered.

What a trainer does is written as flows: generators that put requests here and yield until the answers are in. A flow
knows no clock, socket or thread; whoever drives it sends what is due and hands in what comes (`driver.py` for real,
a simulation otherwise).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from evergrad.messages import NEWEST, Generation, Message, Request, Send, Stale

T = TypeVar("T")
Flow = Generator[None, None, T]
Heard = Callable[[int, Message], None]
"""Is told the place of a request among those asked at once, and the answer to it."""

RESEND_S = 1.0
"""A request is sent again after this long, then after twice as long each time ..."""
RESEND_MAX_S = 8.0
"""... up to this."""


@dataclass(slots=True)
class _Open:
    send: Send
    due_s: float | None = None
    wait_s: float = RESEND_S


def unheard(place: int, answer: Message) -> None:
    """Nobody wants to know before all are answered."""


class Exchange:
    """The open requests of one trainer and the answers to them; late and unasked answers are dropped."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[Request, _Open] = {}
        self._answers: dict[Request, Message] = {}

    def number(self) -> Request:
        """An id no request of this trainer has had."""
        self._last += 1
        return Request(self._last)

    def ask(self, requests: Sequence[tuple[Request, Send]], heard: Heard = unheard) -> Flow[list[Message]]:
        """Send these and wait until all are answered; the answers come in the order of the requests.

        `heard` is told each answer while others are still on their way.
        """
        ids = [request for request, _ in requests]
        left = dict(enumerate(ids))
        self._open.update((request, _Open(send)) for request, send in requests)
        try:
            while True:
                for place in [place for place, request in left.items() if request in self._answers]:
                    heard(place, self._answers[left.pop(place)])
                if not left:
                    return [self._answers[request] for request in ids]
                yield
        finally:
            for request in ids:
                self._open.pop(request, None)
                self._answers.pop(request, None)

    def receive(self, message: Message) -> None:
        """A message has come."""
        request = getattr(message, "request", None)
        if request in self._open:
            del self._open[request]
            self._answers[request] = message

    def void(self, addresses: set[str], generation: Generation) -> None:
        """What was asked of these is of a generation that has passed; it is answered so, whoever is still there."""
        for request, open_request in list(self._open.items()):
            if open_request.send.to in addresses:
                del self._open[request]
                self._answers[request] = Stale(request, generation, NEWEST)

    def hurry(self) -> None:
        """Whoever was asked may not have heard it: all is sent again now."""
        for request in self._open.values():
            request.due_s = None if request.due_s is None else -inf

    def due(self, now_s: float) -> list[Send]:
        """What is to be sent now, for the first time or again."""
        sends = []
        for request in self._open.values():
            if request.due_s is None or now_s >= request.due_s:
                if request.due_s is not None:
                    request.wait_s = min(2 * request.wait_s, RESEND_MAX_S)
                request.due_s = now_s + request.wait_s
                sends.append(request.send)
        return sends
