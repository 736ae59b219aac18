"""What a pserver's process does between requests: it copies slices of a cut for a thread to write, and loads pieces."""

import logging
import os
import time
from collections.abc import Callable

from evergrad.checkpoint.pieces import DensePiece, Piece, RowsPiece
from evergrad.errors import EvergradError
from evergrad.messages import Obstacle, Restore, Send
from evergrad.pserver.background import Facts, Finished, Loader, Saver, ToWrite, obstacle_of
from evergrad.pserver.pserver import Pserver

log = logging.getLogger("evergrad.pserver")

SLICE_BYTES = 1 << 19
"""So much is copied for a checkpoint before requests are looked at again: about half a millisecond."""
SHARE = 0.05
"""While trainers ask for something, copying takes so much of the loop and writing of each other processor ..."""
QUIET_S = 0.2
"""... and both take all there is when none has asked for so long."""
LOOK_S = 0.005
"""How often to look whether a thread is ready for more."""


class Between:
    """Work between the requests of one pserver.

    Args:
        pserver: which.
        saver: writes its pieces.
        load: begins to read what it is to load.
        clock: seconds, counted from anywhere.
        processors: how many this process may use.
    """

    def __init__(
        self,
        pserver: Pserver,
        saver: Saver,
        load: Callable[[Restore], Loader] = Loader,
        clock: Callable[[], float] = time.monotonic,
        processors: int | None = None,
    ) -> None:
        self._pserver, self._saver = pserver, saver
        self._begin_load, self._clock = load, clock
        self._others = max((processors or len(os.sched_getaffinity(0))) - 1, 1)
        self._loader: Loader | None = None
        self._load_began_s = self._asked_s = 0.0
        self._copy_s = self._write_s = 0.0
        """When the next slice may be copied with regard to the loop's time, and with regard to other processors'."""

    @property
    def is_busy(self) -> bool:
        """Whether something is being saved or loaded."""
        return self._pserver.loading is not None or self._pserver.saving is not None

    def asked(self, now_s: float) -> None:
        """A trainer has asked for something."""
        self._asked_s = now_s

    def work(self, now_s: float) -> tuple[list[Send], float | None]:
        """Do something for about a millisecond, if there is anything to do.

        Returns:
            What to send, and in how many seconds to work again; None: when there was a message, or soon.
        """
        restore, self._saver.wanted = self._pserver.loading, self._pserver.saving
        if self._loader is not None and self._loader.restore is not restore:
            self._loader.close()
            self._loader = None
        return self._load(restore, now_s) if restore is not None else self._save(now_s)

    def close(self) -> None:
        """End the threads."""
        self._saver.close()
        if self._loader is not None:
            self._loader.close()
            self._loader.join()

    def _save(self, now_s: float) -> tuple[list[Send], float | None]:
        sends = self._results(now_s)
        is_quiet = now_s - self._asked_s > QUIET_S
        wait_s = max(self._copy_s, self._write_s) - now_s
        if not is_quiet and wait_s > 0:
            return sends, wait_s
        has_worked = self._pserver.release()
        if self._pserver.serial is not None and self._saver.has_room:
            self._copy_slice(self._pserver.serial)
            has_worked = True
        if not has_worked:
            return sends, LOOK_S if self._pserver.saving is not None else None
        ended_s = self._clock()
        self._copy_s = now_s + (ended_s - now_s) / SHARE
        return sends, 0.0 if is_quiet else max(self._copy_s, self._write_s) - ended_s

    def _results(self, now_s: float) -> list[Send]:
        sends = []
        for saved in self._saver.results():
            self._write_s = max(self._write_s, now_s) + saved.processor_s / (SHARE * self._others)
            if saved.failure is None:
                sends += self._pserver.piece_written(saved.serial, saved.files)
            else:
                log.warning("save.failed serial=%d reason=%s", saved.serial, saved.failure)
                sends += self._pserver.write_failed(saved.serial, saved.failure)
        return sends

    def _copy_slice(self, serial: int) -> None:
        piece, restored = self._pserver.next_piece(SLICE_BYTES), self._pserver.restored
        if piece is None or restored is None:
            return
        if restored.checkpoints is None:
            self._pserver.write_failed(serial, "the pserver was not told where checkpoints go")
        else:
            self._saver.put(ToWrite(restored.checkpoints, serial, restored.schema, restored.place, piece))

    def _load(self, restore: Restore, now_s: float) -> tuple[list[Send], float | None]:
        if self._loader is None:
            self._loader, self._load_began_s = self._begin_load(restore), now_s
        item = self._loader.take()
        if item is None:
            return [], LOOK_S
        try:
            return self._take(item, now_s), 0.0
        except (EvergradError, MemoryError) as exc:
            return self._fail(str(exc), obstacle_of(exc)), 0.0

    def _take(self, item: Facts | Finished | Piece, now_s: float) -> list[Send]:
        match item:
            case Facts():
                self._pserver.begin_load(item.progress, item.updates)
            case Finished():
                if item.failure is not None:
                    return self._fail(item.failure, item.obstacle)
                seconds = now_s - self._load_began_s
                log.info("load.done bytes=%d seconds=%.2f", item.bytes_read, seconds)
                return self._pserver.loaded(item.bytes_read, seconds)
            case RowsPiece() | DensePiece():
                self._pserver.load(item)
        return []

    def _fail(self, reason: str, obstacle: Obstacle) -> list[Send]:
        log.warning("load.failed reason=%s", reason)
        return self._pserver.load_failed(reason, obstacle)
