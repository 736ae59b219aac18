"""A pserver's process: `python -m evergrad.pserver`."""

import argparse
import os
import time
from math import inf

from evergrad.errors import Fenced
from evergrad.heap import keep_freed_memory
from evergrad.kernels.warm import warm
from evergrad.messages import (
    GRACE_S,
    Address,
    AnyMessage,
    AskCheckpoint,
    Join,
    Member,
    Noted,
    Place,
    Request,
    Role,
    Send,
)
from evergrad.pserver.background import Saver
from evergrad.pserver.between import Between
from evergrad.pserver.memory import room_within
from evergrad.pserver.pserver import OfModel, Pserver
from evergrad.sizes import parse_bytes
from evergrad.wire.process import (
    TICK_S,
    Heartbeats,
    Work,
    is_orphan,
    join,
    leave,
    log_to_stderr,
    on_sigterm,
    run,
    serve,
)
from evergrad.wire.transport import Listener, check_address, new_member

JOIN_DEADLINE_S = 600.0


RESEND_S = 0.5


class Process:
    """A pserver with what its loop must know: when it may leave, and what to do between requests."""

    def __init__(self, pserver: Pserver, master: Address, heartbeats: Heartbeats) -> None:
        self.pserver, self._master = pserver, master
        self.between = Between(pserver, Saver())
        self._heartbeats = heartbeats
        self._told_s = 0.0
        self._leave_s = inf
        self._signals = 0

    def handle(self, src: str, message: AnyMessage, now_s: float) -> list[Send]:
        """As `Pserver.handle`, which knows no time."""
        if isinstance(message, Noted):
            return []
        if isinstance(message, OfModel):
            self.between.asked(now_s)
        return self.pserver.handle(src, message)

    def tick(self, now_s: float) -> list[Send]:
        """The loop turns."""
        self._heartbeats.turned()
        newest = self._heartbeats.newest
        if newest is not None and not newest.known and not newest.over:
            raise Fenced("the master has declared this pserver dead; what it held counts no more")
        if now_s - self._told_s < RESEND_S:
            return []
        self._told_s = now_s
        sends = self.pserver.resend()
        if self._signals and self._leave_s == inf:
            self._leave_s = now_s + GRACE_S
            sends.append(Send(self._master, AskCheckpoint(Request(3), self.pserver.member)))
        return sends

    def work(self) -> Work:
        """Something between requests."""
        sends, wait_s = self.between.work(time.monotonic())
        return Work(sends, TICK_S if wait_s is None else wait_s)

    def is_over(self) -> bool:
        """Whether to leave."""
        newest = self._heartbeats.newest
        is_job_over = self.pserver.is_over or (newest is not None and newest.over)
        is_time = self._signals > 1 or time.monotonic() > self._leave_s
        return is_job_over or is_time or is_orphan()

    def stop(self) -> None:
        """SIGTERM: have a checkpoint made and go on until the job is over or the grace is; a second one: leave."""
        self._signals += 1


def main() -> int:
    """Run a pserver until its job has ended; returns the exit status."""
    parser = argparse.ArgumentParser(prog="evergrad pserver", description="Run one pserver of a job.")
    parser.add_argument("--master", required=True, help="the master's address, tcp://127.0.0.1:PORT")
    parser.add_argument("--job", required=True, help="the job's name")
    parser.add_argument("--place", type=int, required=True, help="which part of the model to hold, from 0")
    parser.add_argument("--name", help="what people call this process (pserver-PLACE)")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="address to listen on (port 0: a free one)")
    parser.add_argument("--memory", help="use at most so much, as 512M or 4G, and refuse what would need more")
    options = parser.parse_args()
    limit_bytes = parse_bytes(options.memory) if options.memory else None
    log_to_stderr()
    keep_freed_memory()
    warm()
    room = room_within(limit_bytes) if limit_bytes is not None else lambda: inf
    name = options.name or f"pserver-{options.place}"
    member = Member(new_member(name))
    master = check_address(options.master)
    listener = Listener(options.job, member, options.listen)
    try:
        _run(options.job, master, listener, Pserver(member, room), name, Place(options.place))
    finally:
        listener.close()
    return 0


def _run(job: str, master: Address, listener: Listener, pserver: Pserver, name: str, place: Place) -> None:
    member = pserver.member
    me = Join(Request(1), Role.PSERVER, member, name, os.getpid(), place=place, address=listener.address)
    join(listener, master, me, JOIN_DEADLINE_S)
    pserver.counters = listener.counters  # what the wire refuses is told too
    heartbeats = Heartbeats(job, master, member, pserver.counters)
    process = Process(pserver, master, heartbeats)
    try:
        on_sigterm(process.stop)
        serve(listener, process.handle, process.tick, process.is_over, process.work)
        leave(listener, master, member, Request(2))
    finally:
        process.between.close()
        heartbeats.close()


if __name__ == "__main__":
    run("evergrad pserver", main)
