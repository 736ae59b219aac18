"""What the master has said to the pservers and not yet heard back: restores, commits, ends of epochs."""

from collections import deque
from math import inf

from evergrad.messages import (
    Address,
    CloseEpoch,
    Commit,
    Committed,
    EpochClosed,
    Generation,
    Member,
    Message,
    Place,
    PserverAt,
    Restore,
    Restored,
    Schema,
    Send,
    Source,
    Term,
)

RESEND_S = 0.5


class Pservers:
    """The pservers of one generation.

    Whatever is told them is told again until they acknowledge it, one thing after the other. As a rule one commit is
    under way at a time, because a trainer pulls a step's version from every pserver before it pushes for that step;
    a batch that needs nothing of the model and trains nothing may be done before. While a pserver has two commits to
    acknowledge, no batch is handed out (`are_behind`).
    """

    def __init__(
        self,
        term: Term,
        generation: Generation,
        at: tuple[PserverAt, ...],
        schema: Schema,
        source: Source | None,
        checkpoints: str | None,
        are_restored: bool = False,
    ) -> None:
        self.at = at
        self.loaded: dict[Place, Restored] = {}
        self._open: dict[Address, deque[Message]] = {p.address: deque() for p in at}
        self._sent_s, self._told_s = -inf, inf
        self.are_restored = are_restored
        for p in at if not are_restored else ():
            restore = Restore(term, generation, p.member, p.place, len(at), schema, source, checkpoints)
            self._open[p.address].append(restore)

    def tell(self, message: Commit | CloseEpoch) -> None:
        """Have this sent to all."""
        self._sent_s, self._told_s = -inf, inf
        for told in self._open.values():
            told.append(message)

    def restored(self, message: Restored) -> None:
        """A pserver holds the generation's model."""
        address = self._address(message.place, message.member)
        if address is not None and isinstance(self._told(address), Restore):
            self.loaded[message.place] = message
            self._acknowledge(address)
            self.are_restored = self.are_restored or self.have_acknowledged

    def committed(self, message: Committed) -> None:
        """A pserver has applied a commit."""
        address, told = self._at(message.place)
        if address is not None and isinstance(told, Commit) and told.step == message.step:
            self._acknowledge(address)

    def closed(self, message: EpochClosed) -> None:
        """A pserver knows that an epoch is over."""
        address, told = self._at(message.place)
        if address is not None and isinstance(told, CloseEpoch) and told.epoch == message.epoch:
            self._acknowledge(address)

    def due(self, now_s: float) -> list[Send]:
        """What is to be sent (again) now."""
        if self.have_acknowledged or now_s - self._sent_s < RESEND_S:
            return []
        self._told_s = min(self._told_s, now_s)
        self._sent_s = now_s
        return [Send(address, told[0]) for address, told in self._open.items() if told]

    @property
    def have_acknowledged(self) -> bool:
        """Whether they have acknowledged all they were told."""
        return not any(self._open.values())

    @property
    def are_behind(self) -> bool:
        """Whether one of them has more than one thing to acknowledge."""
        return any(len(told) > 1 for told in self._open.values())

    def waits_for(self, since_s: float) -> list[Place]:
        """The places that have had something to acknowledge since then."""
        return [p.place for p in self.at if self._open[p.address] and self._told_s <= since_s]

    def _at(self, place: Place) -> tuple[Address | None, Message | None]:
        """The address of a place, and what it has been told and not acknowledged."""
        address = next((p.address for p in self.at if p.place == place), None)
        return address, self._told(address) if address is not None else None

    def _told(self, address: Address) -> Message | None:
        told = self._open[address]
        return told[0] if told else None

    def _acknowledge(self, address: Address) -> None:
        """What it was told is done; what comes after it is sent at once."""
        told = self._open[address]
        told.popleft()
        if told:
            self._sent_s, self._told_s = -inf, inf

    def _address(self, place: Place, member: Member) -> Address | None:
        return next((p.address for p in self.at if (p.place, p.member) == (place, member)), None)
