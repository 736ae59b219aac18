"""Checkpoints: the cut, what was written of it, and the facts to restore from."""

from enum import StrEnum

import msgspec

from evergrad.messages.model import Count, DataSpec
from evergrad.messages.parameters import Commit
from evergrad.messages.status import SetAside
from evergrad.messages.types import Generation, Member, Message, Place, Term

Standing = tuple[tuple[int, int], ...]
"""Of an asynchronous epoch: (task, how many of its batches are applied), by task; tasks not begun may be left out."""


class Progress(msgspec.Struct, frozen=True):
    """How far training is: of a cut in its manifest, of the present epoch in the master's record."""

    version: int = 0
    """The version a cut shows; in `async` not used."""
    epoch: int = -1
    """The last epoch begun; -1 before the first."""
    data: DataSpec | None = None
    """What it goes over."""
    first_version: int = 0
    """The version at which it began."""
    first_batch: int = 0
    """The number of its first batch, counted as learning rates that depend on batches do."""
    standing: Standing = ()
    """In `async` how far its tasks are; not used where it is closed."""
    is_closed: bool = False
    """Whether it is over."""
    left_until: int = 0
    """Scripts have left their loops over epochs up to this one."""
    set_aside: tuple[SetAside, ...] = ()
    """The tasks set aside up to there: what the model lacks by exceptions ..."""
    dropped: int = 0
    """... and how many samples it lacks that came too late."""


class FileKind(StrEnum):
    """What a file of a checkpoint holds."""

    ROWS = "rows"
    """Rows of a range of slots of one table, with state and notes, and its candidates."""
    DENSE = "dense"
    """Elements of a dense group: parameters or buffers."""
    OPTIMIZER = "optimizer"
    """The optimizer state of elements of a trained group, and the counts of updates of its parameters."""


class FileInfo(msgspec.Struct, frozen=True):
    """A file as its writer reports it: `path` inside the checkpoint, CRC-32 of its bytes in hexadecimal.

    `slots`, of rows only, is the range [start, stop) of slots that the file covers; `span`, of the others, that of
    elements of the dense group.
    """

    path: str
    bytes: Count
    crc32: str
    kind: FileKind
    place: Place
    table: str | None = None
    slots: tuple[Count, Count] | None = None
    rows: Count = 0
    candidates: Count = 0
    group: Count | None = None
    span: tuple[Count, Count] | None = None


class Hello(Message, frozen=True):
    """A new master leads: refuse older ones from now on, and say where you stand."""

    term: Term


class HelloReply(Message, frozen=True):
    """Where a pserver stands: what it applied last, and in `async` the epoch and how far its tasks are."""

    term: Term
    generation: Generation
    member: Member
    place: Place
    version: int
    last_commit: Commit | None
    epoch: int
    standing: Standing


class Mark(Message, frozen=True):
    """Cut here: in `sync` at `version`; in `async` once exactly `standing` of `epoch` is applied, then go on."""

    term: Term
    generation: Generation
    serial: int
    version: int
    epoch: int
    standing: Standing


class Freeze(Message, frozen=True):
    """Apply no batch until this serial is marked or abandoned, and say how far the tasks are."""

    term: Term
    generation: Generation
    serial: int


class Frozen(Message, frozen=True):
    """How far the tasks of `epoch` are here while this serial freezes them."""

    term: Term
    generation: Generation
    place: Place
    serial: int
    epoch: int
    standing: Standing


class Marked(Message, frozen=True):
    """The cut of this serial is taken; its files are being written."""

    term: Term
    generation: Generation
    place: Place
    serial: int


class Abandon(Message, frozen=True):
    """Give this serial up for ever: forget its cut, write no more of it, thaw."""

    term: Term
    generation: Generation
    serial: int


class Abandoned(Message, frozen=True):
    """Nothing is done for this serial any more."""

    term: Term
    generation: Generation
    place: Place
    serial: int


class Written(Message, frozen=True):
    """All files of this place's part of a cut are durable, or the writing has failed; told until it is noted."""

    generation: Generation
    place: Place
    serial: int
    files: tuple[FileInfo, ...]
    updates: dict[str, int]
    """How often each table was updated up to the cut, by name."""
    failure: str | None = None


class WrittenNoted(Message, frozen=True):
    """The master has heard that."""

    term: Term
    serial: int
