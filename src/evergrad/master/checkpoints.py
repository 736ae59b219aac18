"""When checkpoints are made, and what the pservers are told for one; pure.

A cut is one moment of all pservers. In `sync` it rides in a commit, or is marked at a version that nothing changes
between epochs. In `async` the pservers are frozen, say how far each task is, and are marked at the most of each, which
every one of them still applies. Then they write, and when all have written, the manifest is put: only then does the
checkpoint exist. One cut is under way at a time; one that fails changes nothing, and the next one is tried later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from evergrad.checkpoint.retention import Held, kept
from evergrad.master.progress import Event
from evergrad.messages import (
    Abandon,
    Abandoned,
    CheckpointSpec,
    CheckpointStatus,
    EvaluationDone,
    FileInfo,
    Freeze,
    Frozen,
    Generation,
    Mark,
    Marked,
    Message,
    Place,
    Progress,
    PserverAt,
    SavingDone,
    Send,
    Standing,
    Term,
    Written,
    WrittenNoted,
)

RESEND_S = 0.25
CUT_WITHIN_S = 2.0
"""A cut of `async` that not all pservers have taken after so long is given up: batches wait for it no longer."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""After a failure the next one is tried after this long, then after twice as long each time, up to that."""
GATE_TRIES = 3
"""After so many failures in a row an epoch ends without its checkpoint."""
SERIALS = 16
"""So many serials are taken at once, so that the record need not be written for each."""


Calls = tuple[tuple[EvaluationDone, ...], tuple[SavingDone, ...]]
"""The evaluations and savings that are done."""


class Durable(msgspec.Struct, frozen=True):
    """A checkpoint that exists; `best` is what `best=` made of its version's metrics: less is better."""

    serial: int
    progress: Progress
    best: float | None = None


class Complete(msgspec.Struct, frozen=True):
    """A cut of which all files are written: what its manifest says of them."""

    serial: int
    progress: Progress
    calls: Calls
    files: tuple[FileInfo, ...]
    updates: dict[str, int]


@dataclass(slots=True)
class _Cut:
    """The cut under way."""

    serial: int
    progress: Progress
    calls: Calls
    begun_s: float
    is_frozen: bool
    """Whether the pservers still have to say how far the tasks are."""
    standing: dict[Place, Standing] = field(default_factory=dict)
    marked: set[Place] = field(default_factory=set)
    written: dict[Place, Written] = field(default_factory=dict)
    is_complete: bool = False


@dataclass(slots=True)
class _Failed:
    """The cuts that have failed since one was complete, or since the generation began."""

    times: int = 0
    last_s: float = -inf
    progress: Progress | None = None
    """Of the last one."""

    @property
    def wait_s(self) -> float:
        """How long to wait before the next one."""
        return min(RETRY_S * 2.0 ** (self.times - 1), LONGEST_RETRY_S)


class Checkpoints:
    """The checkpoints of one job as its master sees them.

    Args:
        spec: where and when; None: there are none, and nothing waits for them.
        is_sync: whether the job is `sync`.
        durable: those that exist, oldest first.

    Invariants:
    1. A serial is used once: `serials` are this master's own, and it reserves them before it uses them.
    2. At most one cut is under way.
    """

    def __init__(self, spec: CheckpointSpec | None, is_sync: bool, durable: Sequence[Durable] = ()) -> None:
        self.spec = spec
        self.durable = list(durable)
        self.strays: set[int] = set()
        """Serials that may be complete though nobody goes on from them: to be removed."""
        self.serials = range(0)
        """Those reserved and not used yet."""
        self.made = self.failed = 0
        """How many of this master's are complete, and how many have failed ..."""
        self.failure: str | None = None
        """... and why, as long as none was complete since."""
        self.completed_s: float | None = None
        self._events: list[Event] = []
        self.is_asked = False
        """Whether somebody asked for one."""
        self.is_sync = is_sync
        self._cut: _Cut | None = None
        self._given_up: tuple[int, set[Place]] | None = None
        self._failed = _Failed()
        self._last_s: float | None = None
        self._last_steps = 0
        self._sent_s: float | None = None
        self.begun = -1
        """The serial of the cut begun last."""

    # -- when ----------------------------------------------------------------------------------------------------------

    @property
    def needs_serials(self) -> bool:
        """Whether more are to be reserved."""
        return self.spec is not None and not self.serials

    def is_saved(self, progress: Progress) -> bool:
        """Whether there is a checkpoint of this place, behind which no fall-back will go."""
        mine = _moment(progress, self.is_sync)
        return any(_moment(d.progress, self.is_sync) == mine for d in self.durable) and (
            self.is_sync or progress.is_closed or progress.epoch < 0
        )

    def may_pass(self, progress: Progress) -> bool:
        """Whether scripts may pass this place: it is saved, or saving has failed again and again."""
        return self.spec is None or self._failed.times >= GATE_TRIES or self.is_saved(progress)

    def may_end(self, progress: Progress) -> bool:
        """Whether the job may end here: the same, but saving must have failed here too."""
        failed = self._failed.progress
        has_failed_here = failed is not None and _moment(failed, self.is_sync) == _moment(progress, self.is_sync)
        return self.is_saved(progress) or (self.may_pass(progress) and (self.spec is None or has_failed_here))

    def has_newer(self, serial: int) -> bool:
        """Whether one begun after this one is there."""
        return any(d.serial > serial for d in self.durable)

    def wants(self, progress: Progress, steps: int, is_idle: bool, is_last: bool, now_s: float) -> bool:
        """Whether a cut is due.

        Args:
            progress: where training is.
            steps: counts up the steps, or the batches of `async`.
            is_idle: nothing is trained now.
            is_last: the end of the job waits for it, so that after a failure it is tried again soon.
            now_s: the time.
        """
        if self.spec is None or self._cut is not None or self._given_up is not None or not self.serials:
            return False
        wait_s = min(self._failed.wait_s, RETRY_S) if is_last else self._failed.wait_s
        if now_s - self._failed.last_s < wait_s or self.is_saved(progress):
            return False
        if self._last_s is None:
            self._last_s, self._last_steps = now_s, steps
        by_steps = self.spec.every_steps is not None and steps - self._last_steps >= self.spec.every_steps
        by_time = self.spec.every_s is not None and now_s - self._last_s >= self.spec.every_s
        has_failed = self._failed.times > 0  # what that was due for it still is
        return is_idle or self.is_asked or by_steps or by_time or has_failed

    # -- the cut -------------------------------------------------------------------------------------------------------

    def begin(self, progress: Progress, calls: Calls, steps: int, is_idle: bool, now_s: float) -> int:
        """Begin a cut of this moment; returns its serial, which in `sync` may ride in the commit that makes it."""
        self.begun, self.serials = self.serials[0], self.serials[1:]
        self.is_asked = False
        self._last_s, self._last_steps, self._sent_s = now_s, steps, None
        self._cut = _Cut(self.begun, progress, calls, now_s, is_frozen=not self.is_sync and not is_idle)
        return self.begun

    def due(self, term: Term, generation: Generation, pservers: Sequence[PserverAt], now_s: float) -> list[Send]:
        """What the pservers are told now, again and again until they have answered."""
        cut = self._cut
        is_late = cut is not None and not self.is_sync and now_s - cut.begun_s > CUT_WITHIN_S
        if cut is not None and is_late and len(cut.marked) < len(pservers):
            late = ", ".join(str(p.place) for p in pservers if p.place not in cut.marked)
            self._fail(f"pserver {late} has not taken it after {CUT_WITHIN_S:g} s", now_s)
            cut = None
        if self._given_up is not None:
            serial, heard = self._given_up
            if all(p.place in heard for p in pservers):
                self._given_up = None
            elif self._is_time(now_s):
                return [Send(p.address, Abandon(term, generation, serial)) for p in pservers if p.place not in heard]
            return []
        if cut is None or cut.is_complete or not self._is_time(now_s):
            return []
        message: Message
        if cut.is_frozen:
            message = Freeze(term, generation, cut.serial)
            return [Send(p.address, message) for p in pservers if p.place not in cut.standing]
        p = cut.progress
        epoch = p.epoch + 1 if p.is_closed else max(p.epoch, 0)  # as the pservers count, to whom the next is open then
        message = Mark(term, generation, cut.serial, p.version, epoch, p.standing)
        return [Send(p.address, message) for p in pservers if p.place not in cut.written]

    def _is_time(self, now_s: float) -> bool:
        if self._sent_s is not None and now_s - self._sent_s < RESEND_S:
            return False
        self._sent_s = now_s
        return True

    def heard(
        self, message: Frozen | Marked | Written | Abandoned, term: Term, places: int, now_s: float
    ) -> Message | None:
        """A pserver has said something of a cut; returns what it is answered."""
        answer = WrittenNoted(term, message.serial) if isinstance(message, Written) else None
        if isinstance(message, Abandoned):
            if self._given_up is not None and self._given_up[0] == message.serial:
                self._given_up[1].add(message.place)
            elif self._cut is not None and self._cut.serial == message.serial:
                self._fail(f"pserver {message.place} could not take it", now_s)
            return answer
        cut = self._cut
        if cut is None or cut.serial != message.serial:
            return answer
        match message:
            case Frozen() if cut.is_frozen:
                cut.standing[message.place] = message.standing if message.epoch == cut.progress.epoch else ()
                if len(cut.standing) == places:
                    most = _most(cut.standing.values())
                    cut.progress = msgspec.structs.replace(cut.progress, standing=most)
                    cut.is_frozen, self._sent_s = False, None
            case Marked():
                cut.marked.add(message.place)
            case Written(failure=str(reason)):
                self._fail(f"pserver {message.place}: {reason}", now_s)
            case Written():
                cut.marked.add(message.place)
                cut.written[message.place] = message
        return answer

    def take_complete(self, places: int) -> Complete | None:
        """Once: the cut of which everything is written."""
        cut = self._cut
        if cut is None or cut.is_complete or len(cut.written) < places:
            return None
        cut.is_complete = True
        parts = [cut.written[place] for place in sorted(cut.written)]
        files = tuple(sorted((file for part in parts for file in part.files), key=lambda file: file.path))
        # in `async` one may have refused what others have applied; no key was met later than in the last update
        updates = {name: max(part.updates[name] for part in parts) for name in parts[0].updates}
        return Complete(cut.serial, cut.progress, cut.calls, files, updates)

    @property
    def putting(self) -> int | None:
        """The serial whose manifest is being put: to the next master it is a stray, if it is there at all."""
        return self._cut.serial if self._cut is not None and self._cut.is_complete else None

    def put(self, serial: int, failure: str | None, now_s: float) -> bool:
        """The manifest is there, or could not be put; returns whether there is a new checkpoint.

        One that comes after its generation is a stray.
        """
        cut = self._cut
        if cut is None or cut.serial != serial:
            self.strays |= {serial} if failure is None else set()
            return False
        if failure is not None:
            self._fail(failure, now_s)
            return False
        self._cut, self._failed, self.failure, self.completed_s = None, _Failed(), None, now_s
        self.made += 1
        self.durable.append(Durable(serial, cut.progress))
        took = f"{now_s - cut.begun_s:.1f} s"
        self._events.append(Event(f"checkpoint {serial} is complete: {self.where(cut.progress)}, in {took}"))
        return True

    def _fail(self, reason: str, now_s: float) -> None:
        assert self._cut is not None
        serial = self._cut.serial
        self._failed = _Failed(self._failed.times + 1, now_s, self._cut.progress)
        self._cut, self._given_up, self._sent_s = None, (serial, set()), None
        more = f"; training goes on, the next one is tried in {self._failed.wait_s:g} s"
        self.failed, self.failure = self.failed + 1, reason
        self._events.append(Event(f"checkpoint {serial} has failed: {reason}{more}", is_trouble=True))

    def rate(self, epoch: int, best: float | None) -> list[int]:
        """Metrics were reported for an epoch: they, and what `best=` made of them, belong to the checkpoint of its end.

        Returns:
            The serials of those.
        """
        of_it = [i for i, d in enumerate(self.durable) if d.progress.epoch == epoch and d.progress.is_closed]
        for i in of_it:
            if best is not None:
                self.durable[i] = msgspec.structs.replace(self.durable[i], best=best)
        return [self.durable[i].serial for i in of_it]

    def to_keep(self) -> set[int]:
        """The serials that stay: the newest ones and the best."""
        held = [Held(d.serial, d.best) for d in self.durable]
        return kept(held, self.spec.keep if self.spec is not None else 1)

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def status(self, now_s: float) -> CheckpointStatus | None:
        """How it goes, for people."""
        if self.spec is None:
            return None
        newest = self.durable[-1] if self.durable else None
        at = "" if newest is None else self.where(newest.progress)
        age_s = None if self.completed_s is None else now_s - self.completed_s
        serial = None if newest is None else newest.serial
        return CheckpointStatus(self.spec.url, serial, at, age_s, self.made, self.failed, self.failure)

    def forget(self, serial: int) -> None:
        """A checkpoint cannot be read, or was pruned."""
        self.durable = [d for d in self.durable if d.serial != serial]

    def fall_back(self) -> None:
        """A new generation begins: its pservers know nothing of what was under way or has failed."""
        self._cut = self._given_up = None
        self._failed = _Failed()
        self._last_s = None

    def where(self, progress: Progress) -> str:
        """A place in training in words."""
        if progress.epoch < 0:
            return "before the first epoch"
        at = "its end" if progress.is_closed else f"version {progress.version}" if self.is_sync else "in it"
        return f"epoch {progress.epoch}, {at}"

    def waits_for(self, pservers: Sequence[PserverAt]) -> str:
        """What the cut under way waits for, or the next one; or nothing."""
        if self._given_up is not None:
            missing = [str(p.place) for p in pservers if p.place not in self._given_up[1]]
            return f"pserver {', '.join(missing)} to give up checkpoint {self._given_up[0]}"
        if self._cut is None:
            again = f"a checkpoint, which has failed and is tried again: {self.failure}"
            return again if self._failed.times else "a checkpoint"
        heard = self._cut.standing if self._cut.is_frozen else self._cut.written
        missing = [str(p.place) for p in pservers if p.place not in heard]
        if missing:
            return f"pserver {', '.join(missing)} to write checkpoint {self._cut.serial}"
        return f"the manifest of checkpoint {self._cut.serial}"


def _moment(progress: Progress, is_sync: bool) -> tuple[int, int, bool, int]:
    """What two progresses that stand for one moment have in common."""
    return (progress.version if is_sync else 0), progress.epoch, progress.is_closed, progress.left_until


def _most(standings: Iterable[Standing]) -> Standing:
    most: dict[int, int] = {}
    for standing in standings:
        for task, batches in standing:
            most[task] = max(batches, most.get(task, 0))
    return tuple(sorted(most.items()))
