"""What every process of a job has besides its role: a loop, a heartbeat, signals, a parent to live no longer than."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from evergrad.errors import ConfigError, EvergradError, Fenced, JobFailed, Unavailable
from evergrad.messages import (
    Address,
    AnyMessage,
    Ended,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Leave,
    Left,
    Member,
    Refused,
    Request,
    Send,
    Unknown,
)
from evergrad.wire.transport import Listener, Network, Received, new_member

log = logging.getLogger("evergrad.process")

TICK_S = 0.05
BEAT_S = 0.5
RESEND_S = 0.5
PATIENCE_S = 5.0
ORPHAN_S = 10.0
PARENT = "EVERGRAD_PARENT_PID"


class Heartbeats:
    """Tells the master from a thread of its own that this process lives, however busy its loop is.

    `newest` is the master's newest answer; None before the first. A process whose launcher is gone and that does not
    leave within `ORPHAN_S` seconds, since its script is busy, is ended.

    Args:
        job: the job's name.
        master: where the master listens.
        member: who speaks.
        counters: what is told of this process besides that it lives.
    """

    def __init__(self, job: str, master: Address, member: Member, counters: Mapping[str, int] | None = None) -> None:
        self.newest: HeartbeatReply | None = None
        self._counters = {} if counters is None else counters
        self._orphan_s: float | None = None
        self._job, self._master, self._member = job, master, member
        self._turned_s = time.monotonic()
        self._unanswered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evergrad-heartbeat", daemon=True)
        self._thread.start()

    def turned(self) -> None:
        """The loop has turned."""
        self._turned_s = time.monotonic()

    def rename(self, member: Member) -> None:
        """Speak for this member from now on."""
        self._member, self.newest = member, None

    def silence_s(self) -> float:
        """For how many seconds' worth of heartbeats the master has not answered; a pause of this process has none."""
        return self._unanswered * BEAT_S

    def close(self) -> None:
        """Stop; returns when the thread has ended."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        network = Network(self._job, new_member("beat"))
        request = 0
        try:
            while not self._stop.wait(BEAT_S):
                request += 1
                self._unanswered += 1
                idle_s = time.monotonic() - self._turned_s
                beat = Heartbeat(Request(request), self._member, idle_s, dict(self._counters))
                self._take(network.exchange([Send(self._master, beat)], 0.0))
                self._end_orphan()
        except Fenced as exc:
            log.error("heartbeat.refused reason=%s", exc)
        finally:
            network.close(linger_s=0.0)

    def _end_orphan(self) -> None:
        if self._orphan_s is None:
            self._orphan_s = time.monotonic() if is_orphan() else None
        elif time.monotonic() - self._orphan_s > ORPHAN_S:
            log.error("orphan.ended seconds=%.0f", ORPHAN_S)
            os._exit(1)

    def _take(self, received: Iterable[Received]) -> None:
        for _, message in received:
            if isinstance(message, HeartbeatReply) and (self.newest is None or message.term >= self.newest.term):
                self.newest, self._unanswered = message, 0


class Work(NamedTuple):
    """What came of work between requests: what to send, and how long the loop may wait for a message now."""

    sends: list[Send]
    wait_s: float = TICK_S


def serve(
    listener: Listener,
    handle: Callable[[str, AnyMessage, float], list[Send]],
    tick: Callable[[float], list[Send]],
    is_over: Callable[[], bool],
    work: Callable[[], Work] = lambda: Work([]),
) -> None:
    """The loop of a role: messages in, messages out, and a tick every `TICK_S` seconds, until it is over.

    It may `work` for a moment in each turn, when the answers are on their way.
    """
    wait_s, ticked_s = TICK_S, 0.0
    sends: list[Send] = []
    while not is_over():
        received = listener.exchange(sends, wait_s)
        now_s = time.monotonic()
        for src, message in received:
            listener.send(handle(src, message, now_s))
        sends, wait_s = work()
        if now_s - ticked_s >= TICK_S:
            ticked_s = now_s
            sends += tick(now_s)
    listener.send(sends)


def join(network: Network, master: Address, message: Join, deadline_s: float) -> Joined:
    """Become a member; waits for a master that is not there yet.

    Raises:
        ConfigError: refused, with the reason.
        JobFailed: the job is over.
        Unavailable: no master answered within `deadline_s` seconds.
    """
    answer = ask(network, master, message, deadline_s)
    if isinstance(answer, Joined):
        return answer
    if isinstance(answer, Unknown):
        raise Fenced("the master has declared this process dead; start it again")
    if isinstance(answer, Ended):
        raise JobFailed(answer.failure or "the job is over already")
    raise ConfigError(answer.reason if isinstance(answer, Refused) else f"the master answered {type(answer).__name__}")


def leave(network: Network, master: Address, member: Member, request: Request, deadline_s: float = 2.0) -> None:
    """Say goodbye; gives up after `deadline_s` seconds."""
    try:
        ask(network, master, Leave(request, member), deadline_s)
    except EvergradError:
        log.info("leave.unanswered member=%s", member)


def ask(network: Network, to: Address, message: Join | Leave, deadline_s: float) -> AnyMessage:
    """Send a request until it is answered.

    Raises:
        Unavailable: it was not within `deadline_s` seconds.
    """
    end_s = time.monotonic() + deadline_s
    told_s = time.monotonic()
    while time.monotonic() < end_s:
        if time.monotonic() - told_s > PATIENCE_S:
            told_s = time.monotonic()
            log.warning("master.unheard address=%s; it is waited for another %.0f s", to, end_s - told_s)
        for _, answer in network.exchange([Send(to, message)], RESEND_S):
            if isinstance(answer, Joined | Refused | Ended | Left | Unknown) and answer.request == message.request:
                return answer
    raise Unavailable(f"no master answered at {to} within {deadline_s:.0f} s; is the job running?")


def is_orphan() -> bool:
    """Whether the launcher that started this process is gone."""
    parent = os.environ.get(PARENT)
    return parent is not None and os.getppid() != int(parent)


def on_sigterm(callback: Callable[[], None]) -> None:
    """Call this when SIGTERM or SIGINT comes; what a launcher is sent reaches its processes through it alone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: callback())


def write_atomically(path: Path, text: str) -> None:
    """Put a small file where readers see it whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """Run a process's main function and exit: 2 for the user's mistakes, 1 for other failures, a sentence for each."""
    try:
        sys.exit(main())
    except EvergradError as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def log_to_stderr() -> None:
    """Log INFO and above, one line an event."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
