"""ZeroMQ sockets: a `Network` over which a process asks others, a `Listener` that others can ask too.

A process asks over one DEALER per peer; a role others ask listens on one ROUTER too. A message for a peer that is not
there waits in a bounded queue and is dropped beyond it: whoever needs an answer sends again.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from urllib.parse import urlsplit

import zmq

from evergrad.errors import ConfigError, Fenced
from evergrad.messages import Address, AnyMessage, Send
from evergrad.wire.codec import REFUSED, Codec, Malformed, refusal

log = logging.getLogger("evergrad.wire")

QUEUE_MESSAGES = 1000
"""Messages kept for a slow peer, in each direction."""
MAX_AT_ONCE = 100
"""Messages taken from a socket before anything else has its turn."""
MAX_FRAME_BYTES = 1 << 33
SILENT_S = 60.0
"""A peer that has said nothing for so long may be gone: its socket is closed when another one is opened."""
MOST_PEERS = 500
"""Sockets for peers at most: ZeroMQ allows a thousand."""
MALFORMED = "malformed messages"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Received = tuple[str, AnyMessage]


def check_address(address: str) -> Address:
    """An address to listen on or to connect to.

    Raises:
        ConfigError: it is no `tcp://host:port`, or not on this machine.
    """
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise ConfigError(f"{address!r} is no address; write tcp://127.0.0.1:PORT")
    if parts.hostname not in LOOPBACK:
        raise ConfigError(
            f"{address} is beyond this machine, and this version has no keys to keep strangers out; use tcp://127.0.0.1:PORT"
        )
    return Address(address)


class Network:
    """Asks other processes, each over a socket of its own. Not for use by two threads.

    Args:
        job: the job's name; a process of another job refuses to talk.
        member: the identity under which this process is known.
    """

    def __init__(self, job: str, member: str) -> None:
        self.counters: Counter[str] = Counter()
        self._codec = Codec(job)
        self._member = member
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[zmq.Socket[bytes], str] = {}
        self._heard_s: dict[zmq.Socket[bytes], float] = {}

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[Received]:
        """Send these, then wait up to `timeout_s` for messages; returns all that are there, with their senders.

        Raises:
            Fenced: a peer belongs to another job or runs another version.
        """
        self.send(sends)
        ready = self._poller.poll(int(max(0.0, timeout_s) * 1000))
        return [received for socket, _ in ready for received in self.receive(socket)]

    def send(self, sends: Iterable[Send]) -> None:
        """Queue these for their peers."""
        for to, message in sends:
            socket = self._peers.get(to) or self._connect(to)
            try:
                socket.send_multipart(self._codec.encode(message), zmq.DONTWAIT, copy=False)
            except zmq.Again:
                self.counters["dropped: a peer's queue is full"] += 1

    def receive(self, socket: "zmq.Socket[bytes]") -> list[Received]:
        """What has come over this socket, at most `MAX_AT_ONCE` messages."""
        received: list[Received] = []
        address, self._heard_s[socket] = self._addresses[socket], time.monotonic()
        while len(received) < MAX_AT_ONCE and (frames := _receive(socket)) is not None:
            if bytes(frames[0]) == REFUSED and len(frames) == 2:
                raise Fenced(f"{address} refuses: {bytes(frames[1]).decode(errors='replace')}")
            try:
                received.append((address, self._codec.decode(frames)))
            except Malformed as exc:
                self._note_malformed(address, exc)
        return received

    def _note_malformed(self, peer: str, reason: Exception) -> None:
        """Count it; the log has the first ten and then fewer and fewer, so that nobody can fill it."""
        self.counters[MALFORMED] += 1
        count = self.counters[MALFORMED]
        if count <= 10 or str(count).strip("0") == "1":
            log.warning("message.malformed count=%d peer=%s reason=%s", count, peer, reason)

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        check_address(address)
        self._close_silent()
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, self._member.encode())
        _bound_queues(socket)
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        self._peers[address] = socket
        self._addresses[socket], self._heard_s[socket] = address, time.monotonic()
        return socket

    def _close_silent(self) -> None:
        """Let go of peers that seem to be gone, and of what is queued for them; one that is not is connected anew."""
        since_s = time.monotonic() - SILENT_S
        by_silence = sorted(self._peers.items(), key=lambda peer: self._heard_s[peer[1]])
        too_many = len(by_silence) - MOST_PEERS + 1
        for number, (address, socket) in enumerate(by_silence):
            if number < too_many or self._heard_s[socket] < since_s:
                self._poller.unregister(socket)
                socket.close(linger=0)
                del self._peers[address], self._addresses[socket], self._heard_s[socket]

    def close(self, linger_s: float = 0.5) -> None:
        """Close everything; what is queued has `linger_s` seconds to leave."""
        for socket in self._addresses:
            self._poller.unregister(socket)
            socket.close(linger=int(linger_s * 1000))
        self._addresses, self._peers, self._heard_s = {}, {}, {}
        self._context.term()


class Listener(Network):
    """A `Network` that others can ask too, over a ROUTER of its own.

    Raises:
        ConfigError: the address is beyond this machine, or taken.
    """

    def __init__(self, job: str, member: str, listen: str) -> None:
        check_address(listen)
        super().__init__(job, member)
        self._job = job
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        _bound_queues(self._router)
        try:
            self._router.bind(listen)
        except zmq.ZMQError as exc:
            self.close()
            reason = os.strerror(exc.errno or 0)
            raise ConfigError(f"cannot listen on {listen}: {reason}; choose another port, or 0 for a free one") from exc
        self._poller.register(self._router, zmq.POLLIN)
        endpoint = self._router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = Address(endpoint.rstrip(b"\0").decode())

    def send(self, sends: Iterable[Send]) -> None:
        """Queue these for members that have asked, or for the processes at these addresses."""
        for send in sends:
            if "://" in send.to:
                self._ask(send)
            else:
                self._answer(send)

    def receive(self, socket: "zmq.Socket[bytes]") -> list[Received]:
        """What has come over this socket, at most `MAX_AT_ONCE` messages."""
        if socket is not self._router:
            return super().receive(socket)
        received: list[Received] = []
        while len(received) < MAX_AT_ONCE and (frames := _receive(socket)) is not None:
            peer, body = bytes(frames[0]), frames[1:]
            try:
                if not self._codec.is_ours(body):
                    self._refuse(peer)
                message = self._codec.decode(body)
                if b"://" in peer:
                    raise Malformed("a sender whose name reads like an address, where the answer would go")
                received.append((peer.decode(), message))
            except (Malformed, UnicodeDecodeError) as exc:
                self._note_malformed(repr(peer[:40]), exc)
        return received

    def close(self, linger_s: float = 0.5) -> None:
        """Close everything; what is queued has `linger_s` seconds to leave."""
        self._router.close(linger=int(linger_s * 1000))
        super().close(linger_s)

    def _ask(self, send: Send) -> None:
        """An address that a peer said is its own may be none; that must not end this process."""
        try:
            super().send([send])
        except ConfigError as exc:
            self.counters["dropped: not an address of this machine"] += 1
            log.warning("send.no_address reason=%s", exc)

    def _answer(self, send: Send) -> None:
        try:
            frames = [send.to.encode(), *self._codec.encode(send.message)]
            self._router.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as exc:
            reason = "a peer's queue is full" if exc.errno == zmq.EAGAIN else "a peer is gone"
            self.counters[f"dropped: {reason}"] += 1

    def _refuse(self, peer: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([peer, *refusal(self._job)], zmq.DONTWAIT)


def _receive(socket: "zmq.Socket[bytes]") -> list[memoryview] | None:
    events = socket.get(zmq.EVENTS)
    if not isinstance(events, int) or not events & zmq.POLLIN:
        return None
    return [frame.buffer for frame in socket.recv_multipart(zmq.DONTWAIT, copy=False)]


def _bound_queues(socket: "zmq.Socket[bytes]") -> None:
    socket.set(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.set(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def new_member(name: str) -> str:
    """An identity no other process has: a readable name, the pid, and random digits."""
    return f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
