"""Joining, living, leaving."""

import msgspec

from evergrad.messages.model import Count
from evergrad.messages.types import Address, Attempt, Generation, Member, Message, Place, Request, Role, Term


class Join(Message, frozen=True):
    """A process asks to be a member. `name` is what people call it ("trainer-1").

    `began` is the generation in which a trainer's script began, None if it begins now.
    """

    request: Request
    role: Role
    member: Member
    name: str
    pid: int
    numerics: str = ""
    place: Place | None = None
    address: Address | None = None
    began: Generation | None = None


class Joined(Message, frozen=True):
    """Welcome. `lease_s`: silence after which a member counts as dead."""

    request: Request
    term: Term
    generation: Generation
    lease_s: float


class Refused(Message, frozen=True):
    """The answer to a request that cannot be granted; `reason` is one sentence that says what to do."""

    request: Request
    reason: str


class Heartbeat(Message, frozen=True):
    """A member lives; `idle_s` is how long ago its loop last turned, `counters` what it has refused or repeated."""

    request: Request
    member: Member
    idle_s: float
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class HeartbeatReply(Message, frozen=True):
    """`known` is False for a member declared dead, which must join anew under a new incarnation.

    `over`: the job has ended, and failed if there is a `failure`. `is_whole`: all pservers of the generation are there.
    """

    request: Request
    term: Term
    generation: Generation
    known: bool
    over: bool
    failure: str | None
    is_whole: bool = True


class Raised(msgspec.Struct, frozen=True):
    """The script raised `error` in an attempt at a task, of which every pserver has applied so many batches."""

    generation: Generation
    attempt: Attempt
    batches: Count
    error: str


class Leave(Message, frozen=True):
    """A member goes for good; what it held is handed to others.

    `failure` is the script's traceback, if it raised; it ends the job, unless it was `raised` in a task.
    """

    request: Request
    member: Member
    failure: str | None = None
    raised: Raised | None = None


class Unknown(Message, frozen=True):
    """The asker is no member (any more): it must join anew under a new incarnation."""

    request: Request


class AskLeader(Message, frozen=True):
    """Is the asker the leader? Where there is none, it becomes it. Of an attempt at a saving: does it count, too?"""

    request: Request
    member: Member
    saving: Attempt | None = None


class LeaderIs(Message, frozen=True):
    """Whether the asker is the leader."""

    request: Request
    leader: bool


class Left(Message, frozen=True):
    """A goodbye was noted."""

    request: Request


class Exited(Message, frozen=True):
    """The launcher saw the process called `name` (with this pid) end."""

    request: Request
    name: str
    pid: int
