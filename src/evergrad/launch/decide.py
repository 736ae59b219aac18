"""What to do when a process has ended: plain data in, plain data out."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from evergrad.messages import Role

FAILED = 1
"""Exit status of a process whose job failed."""
MISTAKE = 2
"""Exit status of a process that found a mistake of the user, in one sentence on stderr."""
LEFT = 128 + signal.SIGTERM
"""Exit status of a trainer that was asked to leave, handed its task back and left."""
RAISED = 75
"""Exit status of a trainer that wants its script started anew, of which the master knows: it raised in a task, or the
job has fallen back behind where it was."""
STEADY_S = 10.0
"""A process that has run for so long was started well; dying is then no reason to wait with the next start."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 4.0
BUDGET_S = 3600.0
"""Restarts are counted over so long: a trainer that dies now and then in a job of weeks is never given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A process has ended while the job was under way.

    `status` as `subprocess` gives it: negative for a signal. `restarts_s`: how many seconds ago this one was started
    again, for each time, the first time first. `max_restarts`: how often it may be within `BUDGET_S`. `others`: how
    many more trainers run, or are about to.
    """

    role: Role
    status: int
    restarts_s: tuple[float, ...]
    max_restarts: int
    others: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """It is gone for good, and the job goes on without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after this many seconds."""

    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """It says that the job is over; unless the master soon says so too, the process is missing."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: wait for the others to leave, and end with this exit status; the reason may be the master's."""

    status: int
    reason: str | None


Action = LetGo | Restart | Confirm | Finish


def decide(end: End) -> Action:
    """What the launcher does about the end of a process.

    A trainer holds nothing that the others do not have, so it is started again; one that dies too often is shut out for
    a while, not for good. A pserver and the master, too, are started again: the job falls back to a checkpoint, or the
    next master goes on with the record. Without one of them nothing goes on: if that happens too often the job has
    failed.
    """
    if end.status == MISTAKE and not (end.role is Role.TRAINER and end.restarts_s and end.others):
        return Finish(MISTAKE, None)
    match end.role:
        case Role.TRAINER:
            return _trainer(end)
        case Role.PSERVER if end.status == 0:
            return Confirm()
        case Role.MASTER if end.status in (0, FAILED):
            return Finish(end.status, None)
        case _:
            return _needed(end)


def _needed(end: End) -> Action:
    """A process without which the job cannot go on."""
    recent = [age_s for age_s in end.restarts_s if age_s < BUDGET_S]
    if len(recent) < end.max_restarts:
        return _restart(how(end.status), backoff_s(end.restarts_s))
    again = f" and has been restarted {len(recent)} times within an hour" if recent else ""
    return Finish(FAILED, f"{how(end.status)}{again}")


def _trainer(end: End) -> Action:
    if end.status == 0:
        return Confirm()
    if end.status == FAILED:
        return Finish(FAILED, None)
    if end.status == MISTAKE:
        return LetGo("was started again and does not fit the job any more; the job goes on without it")
    if end.status in (LEFT, -signal.SIGTERM):
        return LetGo("was asked to leave and left")
    if end.status == RAISED:  # the master bounds how often: it sets tasks aside, and ends the job if that is no help
        return _restart(how(end.status), FIRST_BACKOFF_S)
    recent = [age_s for age_s in end.restarts_s if age_s < BUDGET_S]
    if len(recent) < end.max_restarts:
        return _restart(how(end.status), backoff_s(end.restarts_s))
    reason = f"{how(end.status)} and has been restarted {len(recent)} times within an hour"
    if not end.others:
        return Finish(FAILED, f"{reason}; there is no other trainer")
    if not recent:
        return LetGo(f"{how(end.status)}; the job goes on without it")
    return _restart(reason, BUDGET_S - recent[-end.max_restarts])


def _restart(reason: str, after_s: float) -> Restart:
    when = f"in {after_s / 60:.0f} min" if after_s > 120 else f"in {after_s:.3g} s" if after_s else "now"
    return Restart(after_s, f"{reason}; it starts again {when}")


def backoff_s(restarts_s: Sequence[float]) -> float:
    """Seconds to wait before the next restart: none after a steady run, else 0.5, doubling up to 4.

    Args:
        restarts_s: as in `End`.
    """
    unsteady, ended_s = 0, 0.0
    for age_s in reversed(restarts_s):
        if age_s - ended_s >= STEADY_S:
            break
        unsteady, ended_s = unsteady + 1, age_s
    return float(min(FIRST_BACKOFF_S * 2 ** min(unsteady - 1, 16), LONGEST_BACKOFF_S)) if unsteady else 0.0


def how(status: int) -> str:
    """How a process ended, in words: "was killed by SIGKILL"."""
    if status == RAISED:
        return "asked to be started again"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
