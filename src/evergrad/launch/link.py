"""The launcher's talk with the master: status asked for at an interval, requests sent again until answered."""

from collections.abc import Callable, Iterable
from typing import Protocol

from evergrad.messages import AnyMessage, AskStatus, Message, Noted, Refused, Request, Send, Status

ASK_EVERY_S = 0.5


class Exchange(Protocol):
    """What is needed of a network; `evergrad.wire.transport.Network` is one."""

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[tuple[str, AnyMessage]]:
        """Send these, wait up to `timeout_s` for messages, return those that came."""
        ...

    def close(self) -> None:
        """Close all sockets."""
        ...


class MasterLink:
    """Asks one master. `status` is the newest answer.

    Invariant: what is told stays in `_open` until the master has answered it.
    """

    def __init__(self, network: Exchange, address: str) -> None:
        self.status: Status | None = None
        self._network = network
        self._address = address
        self._requests = 0
        self._open: dict[Request, Message] = {}
        self._ask_at = 0.0

    def tell(self, make: Callable[[Request], Message]) -> None:
        """Have a message delivered; it is sent with the next turn."""
        message = make(self._next())
        self._open[Request(self._requests)] = message
        self._ask_at = 0.0

    @property
    def is_all_told(self) -> bool:
        """Whether the master has answered everything it was told."""
        return not self._open

    def turn(self, now: float, wait_s: float) -> None:
        """Send what is due and take in what comes within `wait_s` seconds."""
        sends: list[Message] = []
        if now >= self._ask_at:
            self._ask_at = now + ASK_EVERY_S
            sends = [*self._open.values(), AskStatus(self._next())]
        for _, message in self._network.exchange([Send(self._address, m) for m in sends], wait_s):
            self._take(message)

    def close(self) -> None:
        """Close the network."""
        self._network.close()

    def _next(self) -> Request:
        self._requests += 1
        return Request(self._requests)

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, Status):
            self.status = message
        elif isinstance(message, Noted | Refused):
            self._open.pop(message.request, None)
