"""The master's process: `python -m evergrad.master`."""

import argparse
import logging
import os
from pathlib import Path

from evergrad.errors import ConfigError
from evergrad.master.clerk import Clerk
from evergrad.master.failures import MAX_FAILURES
from evergrad.master.master import Master
from evergrad.master.record import decode
from evergrad.master.settings import Settings
from evergrad.messages import GRACE_S, AnyMessage, Request, Send, StopJob, Term
from evergrad.store.file import FileStore
from evergrad.wire.process import PARENT, is_orphan, log_to_stderr, on_sigterm, run, serve, write_atomically
from evergrad.wire.transport import Listener, new_member

log = logging.getLogger("evergrad.master")

LEASE_S = 5.0
LINGER_S = 5.0
"""After the job's end the master answers so long those who have not left yet ..."""
LAUNCHED_LINGER_S = 60.0
"""... and where a launcher has started it, until that tells it to go, since others may just be starting."""


class Process:
    """A master with what its loop must know: when it may leave, and who does its errands."""

    def __init__(self, master: Master, clerk: Clerk) -> None:
        self.master = master
        self._clerk = clerk
        self._is_launched = PARENT in os.environ
        self._leave_s: float | None = None
        self._stopped = self._is_told_to_stop = False

    def handle(self, src: str, message: AnyMessage, now_s: float) -> list[Send]:
        """As `Master.handle`."""
        return self.master.handle(src, message, now_s) + self._clerk.run(self.master, now_s)

    def tick(self, now_s: float) -> list[Send]:
        """As `Master.tick`."""
        if self._is_told_to_stop:
            self._is_told_to_stop, self._stopped = False, self.master.has_ended
            self.master.stop(StopJob(Request(0), "the master was told to stop", GRACE_S), now_s)
        sends = self.master.tick(now_s) + self._clerk.run(self.master, now_s)
        for event in self.master.take_events():
            log.log(logging.WARNING if event.is_trouble else logging.INFO, "job.event %s", event.text)
        if self.master.has_ended and self._leave_s is None:
            self._leave_s = now_s + (LAUNCHED_LINGER_S if self._is_launched else LINGER_S)
        if self._leave_s is not None:
            all_left = self.master.members.is_empty and not self._is_launched
            self._stopped = self._stopped or all_left or now_s > self._leave_s
        self._stopped = self._stopped or is_orphan()
        return sends

    def is_over(self) -> bool:
        """Whether to leave."""
        return self._stopped

    def stop(self) -> None:
        """SIGTERM: end the job after one more checkpoint, or leave if it has ended."""
        self._is_told_to_stop = True


def main() -> int:
    """Run a master until its job has ended; returns the exit status."""
    options = _parse()
    log_to_stderr()
    store = FileStore(options.store) if options.store else None
    settings = Settings(
        options.job, options.pservers, options.lease, options.checkpoints, options.scratch, options.resume,
        keeps_record=store is not None, max_failures=options.max_failures,
    )  # fmt: skip
    listener = Listener(options.job, new_member("master"), options.listen)
    clerk = Clerk(store)
    try:
        process = Process(_master(settings, store), clerk)
        listener.counters = process.master.counters  # what the wire refuses is counted in the job's status too
        on_sigterm(process.stop)
        if options.address_file:
            write_atomically(options.address_file, listener.address)
        else:
            print(listener.address, flush=True)
        serve(listener, process.handle, process.tick, process.is_over)
    finally:
        clerk.close()
        listener.close()
        if store is not None:
            store.close()
    return 1 if process.master.failure else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evergrad master", description="Run the master of a job.")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="address to listen on (port 0: a free one)")
    parser.add_argument("--job", required=True, help="the job's name")
    parser.add_argument("--pservers", type=int, default=1, help="how many pservers the job has")
    parser.add_argument("--address-file", type=Path, help="write the address listened on to this file")
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds of silence until a member counts as dead")
    parser.add_argument("--max-failures", type=int, default=MAX_FAILURES, help="attempts at a task that may fail")
    parser.add_argument("--store", type=Path, help="folder of the job's record, from which the next master goes on")
    parser.add_argument("--checkpoints", help="where checkpoints go, instead of where the script says: a folder or URL")
    parser.add_argument("--scratch", help="where they go if the script does not say either")
    parser.add_argument("--resume", default="auto", help='"auto": from the newest checkpoint; "never"; or one to take')
    return parser.parse_args()


def _master(settings: Settings, store: FileStore | None) -> Master:
    """The first master of a job, or the one after the last."""
    data = store.read() if store is not None else None
    if data is None:
        return Master(settings)
    record = decode(data)
    if record.job != settings.job:
        raise ConfigError(f"the record is of job {record.job!r}, not {settings.job!r}; give each job its own folder")
    return Master(settings, Term(record.term + 1), record)


if __name__ == "__main__":
    run("evergrad master", main)
