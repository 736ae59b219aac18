"""The present generation: which processes hold the model, what it began with, and how a new master finds it."""

from collections.abc import Sequence
from math import inf

import msgspec

from evergrad.master.pservers import RESEND_S, Pservers
from evergrad.master.record import Record
from evergrad.messages import (
    INIT_STEP,
    Commit,
    Generation,
    Hello,
    HelloReply,
    Place,
    PserverAt,
    Schema,
    Send,
    Source,
    Standing,
    Term,
)


class Found:
    """Where the pservers of a generation stand, as they told a new master."""

    def __init__(self, replies: Sequence[HelloReply]) -> None:
        self._replies = replies

    def is_whole(self, generation: Generation) -> bool:
        """Whether all hold this generation and are no more than one commit apart."""
        versions = {reply.version for reply in self._replies}
        is_known = all(reply.generation == generation for reply in self._replies)
        return is_known and min(versions) > INIT_STEP and max(versions) - min(versions) <= 1

    @property
    def version(self) -> int:
        """The version of the newest commit that reached any."""
        return max(reply.version for reply in self._replies)

    @property
    def last_commit(self) -> Commit | None:
        """The commit that made that version."""
        return next(reply.last_commit for reply in self._replies if reply.version == self.version)

    def is_past(self, epoch: int) -> bool:
        """Whether one of them has been told that this epoch is over, in `async`."""
        return any(reply.epoch > epoch for reply in self._replies)

    def standing(self, epoch: int) -> Standing:
        """How many batches of each task all of them have applied."""
        of_all = [dict(reply.standing) if reply.epoch == epoch else {} for reply in self._replies]
        least = {task: min(of.get(task, 0) for of in of_all) for task in of_all[0]}
        return tuple(sorted((task, batches) for task, batches in least.items() if batches))


class Generations:
    """The present generation.

    Invariants:
    1. Nothing is sent to the pservers of a generation before the record names it: `begin`, then `start`.
    2. `pservers` is None until then, and while a new master does not know where they stand.
    """

    def __init__(self, term: Term) -> None:
        self.number = Generation(0)
        self.source: Source | None = None
        self.at: tuple[PserverAt, ...] = ()
        self.pservers: Pservers | None = None
        self._term = term
        self._replies: dict[Place, HelloReply] | None = None
        self._greeted_s = -inf

    @property
    def is_to_start(self) -> bool:
        """Whether it has begun and nothing of it was sent yet."""
        return bool(self.at) and self.pservers is None and self._replies is None

    @property
    def are_restored(self) -> bool:
        """Whether all pservers hold it."""
        return self.pservers is not None and self.pservers.are_restored

    def begin(self, at: tuple[PserverAt, ...], source: Source | None) -> None:
        """A new generation, on these pservers and from this checkpoint."""
        self.number = Generation(self.number + 1)
        self.at, self.source, self.pservers, self._replies = at, source, None, None

    def start(self, schema: Schema, checkpoints: str | None) -> None:
        """The record names it: the pservers may be told, and where checkpoints go."""
        self.pservers = Pservers(self._term, self.number, self.at, schema, self.source, checkpoints)

    # -- a new master --------------------------------------------------------------------------------------------------

    def adopt(self, record: Record) -> None:
        """The generation another master has begun; where its pservers stand they are asked."""
        self.number, self.source, self.at = record.generation, record.source, record.pservers
        self._replies = {} if self.at else None

    def greet(self, now_s: float) -> list[Send]:
        """Hello to those that have not answered it."""
        if self._replies is None or now_s - self._greeted_s < RESEND_S:
            return []
        self._greeted_s = now_s
        return [Send(p.address, Hello(self._term)) for p in self.at if p.place not in self._replies]

    def heard(self, reply: HelloReply) -> None:
        """A pserver says where it stands; one that the generation's `Restore` has not reached knows no place yet."""
        place = next((p.place for p in self.at if p.member == reply.member), None)
        if self._replies is not None and place is not None:
            self._replies[place] = reply

    def found(self) -> Found | None:
        """Where they stand, once all have said so."""
        if self._replies is None or len(self._replies) < len(self.at):
            return None
        return Found(list(self._replies.values()))

    def go_on(self, schema: Schema, found: Found, last: Commit | None) -> None:
        """They hold it; the last commit is told again, since it may have reached only some."""
        self._replies = None
        self.pservers = Pservers(self._term, self.number, self.at, schema, self.source, None, are_restored=True)
        if last is not None:
            self.pservers.tell(msgspec.structs.replace(last, term=self._term, serial=None))

    def waits_for(self) -> list[Place]:
        """The places that have not answered a new master."""
        return [] if self._replies is None else [p.place for p in self.at if p.place not in self._replies]
