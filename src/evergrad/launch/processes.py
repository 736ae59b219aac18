"""The processes of a job: start one, pass on what it writes, end it and all it has started.

A process is the head of a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone and a kill
reaches what the process itself has started.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from evergrad.messages import Role

PARENT_PID = "EVERGRAD_PARENT_PID"
"""Environment variable with the launcher's pid: a role leaves when that is no longer its parent."""
CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 16
PIPE_GRACE_S = 2.0

Echo = Callable[[str, str], None]
"""Shows a line that the process of this name has written."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to start. `log` takes all that the process writes; `echo` says whether the console shows it too.

    A process that `waits` does so until `become` tells it who it is. `told`: the line that tells one to be this.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    log: Path
    echo: bool
    waits: bool = False
    told: bytes = b""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role: its output is not held back, and it knows its parent."""
    return {**base, "PYTHONUNBUFFERED": "1", PARENT_PID: str(os.getpid())}


class Process:
    """One running process. Closed by `reap`, which must be called until it returns the exit status.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Command, echo: Echo) -> None:
        self.command = command
        self._logs = contextlib.ExitStack()
        self._log = self._open_log(command)
        try:
            self._popen = self._start()
        except OSError:
            self._logs.close()
            raise
        self.pid = self._popen.pid
        self._reader = threading.Thread(
            target=self._pass_on, args=(echo,), name=f"output of {command.name}", daemon=True
        )
        if command.echo:
            self._reader.start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command.argv,
            bufsize=0,
            stdin=subprocess.PIPE if self.command.waits else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.command.echo else self._log,
            stderr=subprocess.STDOUT,
            env=environment(os.environ),
            process_group=0,
        )

    def reap(self) -> int | None:
        """The exit status if the process has ended (negative: a signal), once everything it wrote is passed on."""
        # Looked at without being waited for: the zombie keeps the group's number from being given to another.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._kill_group()
        status = self._popen.wait()
        self._close()
        return status

    def become(self, command: Command) -> bool:
        """Tell a process that waits to be this command's from now on; returns whether it could be told."""
        pipe = self._popen.stdin
        assert pipe is not None
        before = self.command, self._log
        self.command, self._log = command, self._open_log(command)
        try:
            pipe.write(command.told)
            pipe.close()
        except OSError:  # it has ended
            self.command, self._log = before
            return False
        return True

    def terminate(self) -> None:
        """Ask the process to leave."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)  # not send_signal, which reaps a process that has ended

    def kill(self) -> None:
        """End the process and all it has started, now; `reap` it afterwards."""
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        if self._reader.is_alive():
            self._reader.join(PIPE_GRACE_S)
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        # Whoever left the group and still holds the pipe keeps its reader, a daemon thread, and the log open.
        if not self._reader.is_alive():
            self._logs.close()

    def _open_log(self, command: Command) -> IO[bytes]:
        return self._logs.enter_context(command.log.open("ab", buffering=0))

    def _pass_on(self, echo: Echo) -> None:
        pipe = self._popen.stdout
        assert pipe is not None
        lines = Lines(lambda line: echo(self.command.name, line))
        with contextlib.closing(pipe):
            for chunk in iter(lambda: os.read(pipe.fileno(), CHUNK_BYTES), b""):
                with contextlib.suppress(OSError):  # a full disk must not stop the training
                    self._log.write(chunk)
                lines.feed(chunk)
        lines.end()


class Lines:
    """Cuts bytes into lines of text. A line that overwrites itself (a progress bar) is shown as it ends."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take more bytes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._show(_text(line))
        if len(self._rest) > LONGEST_LINE_BYTES:
            self.end()

    def end(self) -> None:
        """Show what is left over."""
        if self._rest:
            self._show(_text(self._rest))
        self._rest = b""


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
