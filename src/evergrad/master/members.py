"""Who takes part: joins, leases, goodbyes."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from evergrad.messages import Address, Generation, Member, MemberStatus, Place, PserverAt, Role

NO_GENERATION = Generation(0)


@dataclass(slots=True)
class MemberState:
    """A member. `seen_s` is when it was last heard of (infinity: not yet), `idle_s` how long its loop stood then.

    `answered_s` is when it joined or was last answered what to do, `began` the generation in which its script began.
    """

    member: Member
    role: Role
    name: str
    pid: int
    seen_s: float
    numerics: str = ""
    place: Place | None = None
    address: Address | None = None
    answered_s: float = 0.0
    began: Generation = NO_GENERATION
    idle_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)


PSERVER_LEASE_S = 60.0
REMEMBERED_GONE = 1000
"""A message that comes late from one of so many former members is known as such."""


@dataclass(slots=True)
class Members:
    """The members there are, in the order in which they joined.

    A member is heard of by its messages; one silent for longer than the lease is dead, and stays it: the process
    behind it must join anew. Silence is not idleness: heartbeats come from a thread of their own.
    """

    lease_s: float
    _members: dict[Member, MemberState] = field(default_factory=dict)
    _gone: deque[Member] = field(default_factory=lambda: deque(maxlen=REMEMBERED_GONE))
    _counted: Counter[str] = field(default_factory=Counter)
    """By those that are gone."""

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def __getitem__(self, member: Member) -> MemberState:
        return self._members[member]

    def add(self, state: MemberState) -> None:
        """A process has joined."""
        self._members[state.member] = state

    def add_unheard(self, at: PserverAt, name: str, pid: int) -> None:
        """A pserver that another master knew."""
        self.add(MemberState(at.member, Role.PSERVER, name, pid, inf, place=at.place, address=at.address))

    def name_of(self, member: Member) -> tuple[str, int]:
        """A member's name and pid; of one that is gone, its identity and 0."""
        state = self._members.get(member)
        return (str(member), 0) if state is None else (state.name, state.pid)

    def present(self) -> tuple[PserverAt, ...]:
        """The pservers there are, by place."""
        found = sorted(self.pservers().items())
        return tuple(PserverAt(place, p.member, p.address) for place, p in found if p.address is not None)

    def heard(self, member: Member, now: float) -> MemberState | None:
        """Note that a member lives; None if it is not one."""
        state = self._members.get(member)
        if state is not None:
            state.seen_s = now
        return state

    def remove(self, member: Member) -> MemberState | None:
        """A member left, ended or died."""
        state = self._members.pop(member, None)
        if state is not None:
            self._gone.append(member)
            self._counted.update(state.counters)
        return state

    def is_gone(self, member: Member) -> bool:
        """Whether this one was a member and, as far as remembered, is none any more."""
        return member in self._gone

    def silent(self, now: float) -> list[MemberState]:
        """Members whose lease has run out.

        A pserver's is longer: nothing can take its place yet, so to give it up is to give up the job.
        """
        leases = {Role.PSERVER: max(self.lease_s, PSERVER_LEASE_S)}
        return [m for m in self._members.values() if now - m.seen_s > leases.get(m.role, self.lease_s)]

    def begin_leases(self, now: float) -> None:
        """The leases of those never heard of, whom another master knew, begin now."""
        for member in self._members.values():
            member.seen_s = min(now, member.seen_s)

    def excuse(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long until now, since the master itself did not listen."""
        for member in self._members.values():
            member.seen_s = min(member.seen_s + seconds, now)

    def trainers(self) -> list[MemberState]:
        """The trainers, first joined first."""
        return [m for m in self._members.values() if m.role is Role.TRAINER]

    def pservers(self) -> dict[Place, MemberState]:
        """The pservers by place."""
        return {m.place: m for m in self._members.values() if m.role is Role.PSERVER and m.place is not None}

    def named(self, name: str, pid: int) -> MemberState | None:
        """The member that is the process of this name and pid."""
        return next((m for m in self._members.values() if (m.name, m.pid) == (name, pid)), None)

    def counters(self) -> Counter[str]:
        """What all members have refused, repeated or left out, those that are gone too."""
        total = self._counted.copy()
        for member in self._members.values():
            total.update(member.counters)
        return total

    def status(self, now: float, doing: Callable[[Member], str]) -> tuple[MemberStatus, ...]:
        """All members as the status shows them."""
        return tuple(
            MemberStatus(m.name, m.role, m.pid, max(0.0, now - m.seen_s), doing(m.member))
            for m in self._members.values()
        )

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there."""
        return not self._members
