"""What a master has its process do: storage and the record. It decides; files and waiting are the process's."""

import msgspec

from evergrad.checkpoint.manifest import Metrics
from evergrad.master.checkpoints import Complete
from evergrad.master.record import Found, Record
from evergrad.messages import Schema


class Look(msgspec.Struct, frozen=True):
    """Find the checkpoints of `url`, and which one to begin with: `resume` is "auto", "never" or one to take."""

    url: str | None
    resume: str
    warm_start: str | None


class PutManifest(msgspec.Struct, frozen=True):
    """Make a checkpoint exist."""

    url: str
    job: str
    lineage: str
    schema: Schema
    places: int
    generation: int
    complete: Complete
    reported: dict[int, dict[str, float]]


class ManifestPut(msgspec.Struct, frozen=True):
    """It does, or does not."""

    serial: int
    failure: str | None = None


class PutMetrics(msgspec.Struct, frozen=True):
    """Write what is reported of a checkpoint beside it."""

    url: str
    serial: int
    metrics: Metrics


class MetricsPut(msgspec.Struct, frozen=True):
    """That is done, or cannot be."""

    serial: int
    failure: str | None


class Hold(msgspec.Struct, frozen=True):
    """See that no other job writes to this place until this one ends."""

    url: str
    job: str


class Held(msgspec.Struct, frozen=True):
    """Nobody else does; or why that cannot be seen to, which may be said later too: another job does (`is_other`)."""

    failure: str | None = None
    is_other: bool = False


class Prune(msgspec.Struct, frozen=True):
    """Remove these checkpoints, and what interrupted ones older than `before` have left."""

    url: str
    remove: tuple[int, ...]
    before: int


class Pruned(msgspec.Struct, frozen=True):
    """That is done as far as it could be."""

    failure: str | None = None


class PutRecord(msgspec.Struct, frozen=True):
    """Write the record."""

    number: int
    record: Record


class RecordPut(msgspec.Struct, frozen=True):
    """It is written."""

    number: int


OfStorage = Hold | Look | PutManifest | PutMetrics | Prune
Errand = OfStorage | PutRecord
Result = Held | Found | ManifestPut | MetricsPut | Pruned | RecordPut
