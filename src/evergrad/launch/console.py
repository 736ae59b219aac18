"""The launcher's console: a live screen in a terminal, plain lines elsewhere. Lines may come from any thread."""

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from evergrad.launch import view
from evergrad.messages import Status

PROGRESS_EVERY_S = 5.0


class Console(Protocol):
    """Where a job is shown."""

    def line(self, text: str) -> None:
        """Show a line."""
        ...

    def show(self, status: Status, restarts: Mapping[str, int], now: float) -> None:
        """Show how the job goes."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def console() -> Console:
    """The console that fits standard output."""
    return LiveConsole() if sys.stdout.isatty() else PlainConsole()


class PlainConsole:
    """Lines for what changes, and one of progress every few seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Status | None = None
        self._stall = view.Stall()
        self._progress_at = 0.0

    def line(self, text: str) -> None:
        """Show a line."""
        with self._lock:
            _write(text + "\n")

    def show(self, status: Status, restarts: Mapping[str, int], now: float) -> None:
        """Show what has changed, and progress if none was shown for a while."""
        lines = view.changes(self._last, status)
        is_stalled = self._stall.seen(status, now)
        if not lines and now >= self._progress_at and not status.ended:
            lines = [view.progress_line(status, is_stalled)]
        if lines:
            self._progress_at = now + PROGRESS_EVERY_S
        self._last = status
        for text in lines:
            self.line(text)

    def close(self) -> None:
        """Nothing to undo."""


class LiveConsole:
    """One screen kept up to date, with lines scrolling above it."""

    def __init__(self) -> None:
        self._console = RichConsole(highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._stall = view.Stall()
        self._live.start()

    def line(self, text: str) -> None:
        """Show a line above the screen; colors a program has written itself stay."""
        with contextlib.suppress(OSError):
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def show(self, status: Status, restarts: Mapping[str, int], now: float) -> None:
        """Bring the screen up to date."""
        self._live.update(view.screen(status, restarts, self._stall.seen(status, now)), refresh=True)

    def close(self) -> None:
        """Take the screen away."""
        self._live.stop()


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`); the job goes on, and its logs have everything.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
