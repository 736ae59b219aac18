"""The master's process: `python -m evergrad.master`."""

import argparse
import logging
import os
from pathlib import Path

from evergrad.master.failures import MAX_FAILURES
from evergrad.master.master import Master
from evergrad.messages import Send
from evergrad.wire.process import PARENT, is_orphan, log_to_stderr, on_sigterm, run, serve, write_atomically
from evergrad.wire.transport import Listener, new_member

log = logging.getLogger("evergrad.master")

LEASE_S = 5.0
LINGER_S = 5.0
"""After the job's end the master answers so long those who have not left yet ..."""
LAUNCHED_LINGER_S = 60.0
"""... and where a launcher has started it, until that tells it to go, since others may just be starting."""


class Process:
    """A master with what its loop must know: when it may leave."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self._is_launched = PARENT in os.environ
        self._leave_s: float | None = None
        self._stopped = False

    def tick(self, now_s: float) -> list[Send]:
        """As `Master.tick`."""
        sends = self.master.tick(now_s)
        for event in self.master.take_events():
            log.info("job.event %s", event)
        if self.master.is_over and self._leave_s is None:
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
        """SIGTERM: end the job, or leave if it has ended."""
        self._stopped = self.master.is_over
        self.master.end("the master was told to stop")


def main() -> int:
    """Run a master until its job has ended; returns the exit status."""
    parser = argparse.ArgumentParser(prog="evergrad master", description="Run the master of a job.")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="address to listen on (port 0: a free one)")
    parser.add_argument("--job", required=True, help="the job's name")
    parser.add_argument("--pservers", type=int, default=1, help="how many pservers the job has")
    parser.add_argument("--address-file", type=Path, help="write the address listened on to this file")
    parser.add_argument("--lease", type=float, default=LEASE_S, help="seconds of silence until a member counts as dead")
    parser.add_argument("--max-failures", type=int, default=MAX_FAILURES, help="attempts at a task that may fail")
    options = parser.parse_args()
    log_to_stderr()
    process = Process(Master(options.job, options.pservers, options.lease, max_failures=options.max_failures))
    listener = Listener(options.job, new_member("master"), options.listen)
    listener.counters = process.master.counters  # what the wire refuses is counted in the job's status too
    try:
        on_sigterm(process.stop)
        if options.address_file:
            write_atomically(options.address_file, listener.address)
        else:
            print(listener.address, flush=True)
        serve(listener, process.master.handle, process.tick, process.is_over)
    finally:
        listener.close()
    return 1 if process.master.failure else 0


if __name__ == "__main__":
    run("evergrad master", main)
