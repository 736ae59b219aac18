"""What the master has said to the pservers and not yet heard back: restores and the commit under way."""

from math import inf

from evergrad.messages import (
    Address,
    Commit,
    Committed,
    Generation,
    Member,
    Message,
    Place,
    PserverAt,
    Restore,
    Restored,
    Schema,
    Send,
    Term,
)

RESEND_S = 0.5


class Pservers:
    """The pservers of one generation.

    Whatever is told them is told again until they acknowledge it. At most one commit is outstanding: a trainer can
    push for the next step only after it has pulled that step's version from every pserver.
    """

    def __init__(self, term: Term, generation: Generation, at: tuple[PserverAt, ...], schema: Schema) -> None:
        self.at = at
        self._open: dict[Address, Message] = {}
        self._sent_s, self._told_s = -inf, inf
        self._tell({p.address: Restore(term, generation, p.member, p.place, len(at), schema, None) for p in at})
        self.are_restored = False

    def commit(self, commit: Commit) -> None:
        """Have a commit sent to all."""
        self._tell({p.address: commit for p in self.at})

    def restored(self, message: Restored) -> None:
        """A pserver holds the generation's model."""
        address = self._address(message.place, message.member)
        if address is not None and isinstance(self._open.get(address), Restore):
            del self._open[address]
            self.are_restored = not self._open

    def committed(self, message: Committed) -> None:
        """A pserver has applied a commit."""
        address = next((p.address for p in self.at if p.place == message.place), None)
        told = self._open.get(address) if address is not None else None
        if address is not None and isinstance(told, Commit) and told.step == message.step:
            del self._open[address]

    def due(self, now_s: float) -> list[Send]:
        """What is to be sent (again) now."""
        if not self._open or now_s - self._sent_s < RESEND_S:
            return []
        self._told_s = min(self._told_s, now_s)
        self._sent_s = now_s
        return [Send(address, message) for address, message in self._open.items()]

    @property
    def have_acknowledged(self) -> bool:
        """Whether they have acknowledged all they were told."""
        return not self._open

    def waits_for(self, since_s: float) -> list[Place]:
        """The places that have had something to acknowledge since then."""
        return [p.place for p in self.at if p.address in self._open and self._told_s <= since_s]

    def _tell(self, messages: dict[Address, Message]) -> None:
        self._open = messages
        self._sent_s, self._told_s = -inf, inf

    def _address(self, place: Place, member: Member) -> Address | None:
        return next((p.address for p in self.at if (p.place, p.member) == (place, member)), None)
