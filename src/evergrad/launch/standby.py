"""A process kept ready, so that a trainer that died is back without starting Python and importing torch."""

from collections.abc import Callable

from evergrad.launch.decide import LONGEST_BACKOFF_S
from evergrad.launch.processes import Command, Process


class Standby:
    """At most one process that can become any trainer; another is started when it has.

    Args:
        command: starts it.
        start: starts a command.
    """

    def __init__(self, command: Command, start: Callable[[Command], Process]) -> None:
        self._command, self._start = command, start
        self._process: Process | None = None
        self._start_s = 0.0

    def turn(self, now: float) -> None:
        """See to it that one is there; one that has ended by itself is replaced after a while."""
        if self._process is not None and self._process.reap() is not None:
            self._process, self._start_s = None, now + LONGEST_BACKOFF_S
        elif self._process is None and now >= self._start_s:
            self._process = self._start(self._command)

    def become(self, command: Command) -> Process | None:
        """The process kept ready, now that of this command; None if there is none."""
        process = self._process
        if process is None or not process.become(command):
            return None
        self._process = None
        return process

    def close(self) -> Process | None:
        """Nothing is to be kept ready any more; returns the process that was, to be ended and reaped."""
        process, self._process, self._start_s = self._process, None, float("inf")
        return process
