"""How the job goes, and who asks."""

import msgspec

from evergrad.messages.types import Generation, Message, Request, Role, Term


class AskStatus(Message, frozen=True):
    """Anybody of the job asks how it goes."""

    request: Request


class MemberStatus(msgspec.Struct, frozen=True):
    """A member as the master sees it; `doing` is a few words."""

    name: str
    role: Role
    pid: int
    silent_s: float
    doing: str


class SetAside(msgspec.Struct, frozen=True):
    """A task that is done no more since the script raised `error` in it: which one, and samples left out by that."""

    task: str
    samples: int
    error: str


class CheckpointStatus(msgspec.Struct, frozen=True):
    """The checkpoints of a job: the newest one, where in training it was made, how long ago (None: by another master).

    `made` and `failed` count this master's; `failure` says why the last one has failed.
    """

    url: str
    newest: int | None
    where: str
    age_s: float | None
    made: int
    failed: int
    failure: str | None


class Status(Message, frozen=True):
    """How the job goes. `waiting_for` says who is waited for and why, or is empty.

    `epoch` is the one under way (-1 before the first), `step`/`steps` count inside it (tasks in `async`);
    `samples` counts samples trained since the start; `live` holds the means of what the script reported inside the
    epoch (its loss), `reported` the last metrics by epoch; `counters` count what was refused or repeated. `dropped`
    counts samples that came too late for their step. `term` counts masters, `generation` beginnings of the model.
    """

    request: Request
    job: str
    phase: str
    waiting_for: str
    epoch: int
    epochs: int
    step: int
    steps: int
    version: int
    samples: int
    samples_per_s: float
    live: dict[str, float]
    reported: dict[int, dict[str, float]]
    members: tuple[MemberStatus, ...]
    counters: dict[str, int]
    notes: tuple[str, ...]
    ended: bool
    failure: str | None
    dropped: int = 0
    set_aside: tuple[SetAside, ...] = ()
    checkpoints: CheckpointStatus | None = None
    term: Term = Term(0)
    generation: Generation = Generation(0)


GRACE_S = 25.0
"""How long a last checkpoint may take when a job is stopped."""


class StopJob(Message, frozen=True):
    """The launcher asks the master to end the job, with this failure or without one.

    `grace_s`: after one more checkpoint, if it is made within so many seconds; None: at once.
    """

    request: Request
    failure: str | None
    grace_s: float | None = None


class Noted(Message, frozen=True):
    """A message that needs no other answer has been dealt with."""

    request: Request
