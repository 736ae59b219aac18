"""Signals to the launcher, noted when they come and acted on by its loop."""

import signal
from types import FrameType, TracebackType

NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context in which signals that ask to stop are only noted. For the main thread."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._note) for number in NOTED}
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> int | None:
        """The oldest signal not yet taken."""
        return self._came.pop(0) if self._came else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
