"""This place's part of a checkpoint: which serial it is for, how far it is, and when batches must wait for it."""

from collections import deque
from dataclasses import dataclass, field

from evergrad.checkpoint.pieces import Piece
from evergrad.messages import FileInfo, PushBatch
from evergrad.pserver.batches import Standpoint
from evergrad.pserver.model import Model, ModelCut


@dataclass(slots=True)
class Part:
    """What has been done for one serial.

    Attributes:
        serial: the checkpoint's.
        is_frozen: batches wait: all of them, or with a `target` those beyond it. Until the cut is taken.
        target: what is to be applied before the cut is taken.
        updates: how often each table was updated up to the cut; None before it is taken.
        cut: what is still to be handed out.
        open_pieces: how many are handed out and not written yet.
        files: those written.
        failure: why there will be no more.
        is_noted: the master knows that it is complete.
    """

    serial: int
    is_frozen: bool = False
    target: Standpoint | None = None
    updates: dict[str, int] | None = None
    cut: ModelCut | None = None
    open_pieces: int = 0
    files: list[FileInfo] = field(default_factory=list)
    failure: str | None = None
    is_noted: bool = False

    @property
    def is_taken(self) -> bool:
        """Whether the cut is taken, or was tried to be."""
        return self.updates is not None or self.failure is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come: all is written, or it has failed."""
        return self.failure is not None or (self.updates is not None and self.cut is None and self.open_pieces == 0)


class Cutting:
    """Takes part in one checkpoint at a time.

    Invariant: a serial that is given up, and every lower one, is never taken part in again.
    """

    def __init__(self) -> None:
        self.part: Part | None = None
        self._given_up = -1
        self._over: deque[ModelCut] = deque()

    def turn_to(self, serial: int) -> Part | None:
        """The part for this serial, or None if it is given up. A new one is begun, and any older one given up."""
        if serial <= self._given_up:
            return None
        if self.part is None or serial > self.part.serial:
            self.give_up(serial - 1)
            self.part = Part(serial)
        return self.part

    def give_up(self, serial: int) -> None:
        """Have nothing to do with this serial any more, nor with lower ones."""
        self._given_up = max(self._given_up, serial)
        if self.part is not None and self.part.serial <= self._given_up:
            self._drop_cut(self.part)
            self.part = None

    def give_up_all(self) -> None:
        """Have nothing to do any more with what there is."""
        if self.part is not None:
            self.give_up(self.part.serial)

    def give_up_agreement(self) -> None:
        """The same if the cut is not taken yet: who was agreeing on it is gone."""
        if self.part is not None and not self.part.is_taken:
            self.give_up(self.part.serial)

    def may_apply(self, push: PushBatch) -> bool:
        """Whether a batch need not wait."""
        if self.part is None or not self.part.is_frozen:
            return True
        target = self.part.target
        return target is not None and push.batch + push.batches <= target.of(push.epoch, push.task)

    def cut(self, serial: int, model: Model) -> None:
        """Cut the model for this serial, unless that is given up; batches wait no more.

        Where there is no memory for it, the part has failed.
        """
        part = self.turn_to(serial)
        if part is None or part.is_taken:
            return
        part.is_frozen, part.target = False, None
        try:
            part.cut = model.cut()
        except MemoryError as exc:
            part.failure = str(exc)
            return
        part.updates = part.cut.updates
        self._drop_if_handed_out(part)

    @property
    def serial(self) -> int | None:
        """The serial of which pieces are still to be handed out."""
        return self.part.serial if self.part is not None and self.part.cut is not None else None

    @property
    def saving(self) -> int | None:
        """The serial of which pieces are still to be handed out or written."""
        part = self.part
        return part.serial if part is not None and part.is_taken and not part.is_complete else None

    def next_piece(self, slice_bytes: int) -> Piece | None:
        """Copy about so many bytes of the cut; returns a piece when one is complete."""
        part = self.part
        if part is None or part.cut is None:
            return None
        piece = part.cut.advance(slice_bytes)
        part.open_pieces += piece is not None
        self._drop_if_handed_out(part)
        return piece

    def written(self, serial: int, files: tuple[FileInfo, ...]) -> None:
        """One of the pieces handed out is written, as these files."""
        if self.part is not None and self.part.serial == serial and self.part.failure is None:
            self.part.files += files
            self.part.open_pieces -= 1

    def fail(self, serial: int, reason: str) -> None:
        """Nothing more is written for this serial."""
        if self.part is not None and self.part.serial == serial and not self.part.is_complete:
            self.part.failure, self.part.files = reason, []
            self._drop_cut(self.part)

    def note(self, serial: int) -> None:
        """The master knows that the part for this serial is complete."""
        if self.part is not None and self.part.serial == serial and self.part.is_complete:
            self.part.is_noted = True

    def give_way(self) -> bool:
        """Let a cut that takes memory fail and give all of that back; returns whether there was one."""
        if self.serial is None:
            return False
        self.fail(self.serial, "the pserver is at its memory limit, and rows that change during a save need some")
        while self.release():
            pass
        return True

    def release(self) -> bool:
        """Give back a little of the memory of cuts that are over; returns whether there is more to give back."""
        if self._over:
            if not self._over[0].release():
                self._over.popleft()
            return True
        return self.part is not None and self.part.cut is not None and self.part.cut.release()

    def _drop_if_handed_out(self, part: Part) -> None:
        if part.cut is not None and part.cut.is_handed_out:
            self._drop_cut(part)

    def _drop_cut(self, part: Part) -> None:
        if part.cut is not None:
            part.cut.end()
            self._over.append(part.cut)
            part.cut = None
