"""When and how the pservers update the parameters, as a user says it."""

from dataclasses import dataclass

from evergrad.checks import whole_number
from evergrad.errors import ConfigError
from evergrad.messages import UpdateName, UpdateSpec

MOST_BATCHES = 65_536
"""A step keeps the pushes of all its batches until it is committed."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Synchronous steps: each is one update with the mean over all samples of `batches_per_step` batches.

    The batches are computed by whichever trainers there are, so the number of trainers is no part of the mathematics.

    Args:
        batches_per_step: batches of a step, which come from as many equal streams of the epoch's samples.
        backup_after: seconds after which a batch still being computed is given to a spare trainer too; None: eight
            times the average, at least one second, once ten steps have been measured.
    """

    batches_per_step: int = 1
    backup_after: float | None = None

    def spec(self) -> UpdateSpec:
        """The rule as it crosses the wire."""
        batches = whole_number("Sync: batches_per_step", self.batches_per_step, least=1)
        if batches > MOST_BATCHES:
            raise ConfigError(f"Sync: batches_per_step is {batches}; give at most {MOST_BATCHES:,}")
        _seconds("Sync", self.backup_after)
        return UpdateSpec(UpdateName.SYNC, batches, self.backup_after)


@dataclass(frozen=True, slots=True)
class Async:
    """Asynchronous updates: each batch is applied when it comes, once on every pserver; no trainer waits for another.

    Args:
        batches_per_task: consecutive batches handed to a trainer at a time.
        backup_after: as in `Sync`, for a task.
        ahead: whether a trainer pulls for the next batch of its task, and pushes, while it computes; the next batch
            then lacks the update of the present one. False: it waits for both.
    """

    batches_per_task: int = 8
    backup_after: float | None = None
    ahead: bool = True

    def spec(self) -> UpdateSpec:
        """The rule as it crosses the wire."""
        batches = whole_number("Async: batches_per_task", self.batches_per_task, least=1)
        _seconds("Async", self.backup_after)
        return UpdateSpec(UpdateName.ASYNC, batches, self.backup_after)


Update = Sync | Async


def _seconds(rule: str, value: float | None) -> None:
    if value is not None and not (type(value) in (int, float) and value > 0):
        raise ConfigError(f"{rule}: backup_after is {value!r}; give seconds above zero, or None")
