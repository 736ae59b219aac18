"""The model, as all roles know it."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

from evergrad.init_rows import Initializer
from evergrad.optim import RuleSpec

Count = Annotated[int, msgspec.Meta(ge=0)]
OneOrMore = Annotated[int, msgspec.Meta(ge=1)]
"""Checked where a message arrives; what is divided by or allocated must not be nonsense."""


class Evict(StrEnum):
    """Which rows make room for others in a table with `max_rows`."""

    RECENT = "recent"
    """The least recently used."""
    COUNT = "count"
    """The least often used; among these the least recently used."""


class TableSpec(msgspec.Struct, frozen=True):
    """One embedding table. What the options of policy mean is written in `pserver/policy.py`."""

    name: str
    dim: OneOrMore
    rule: RuleSpec
    initializer: Initializer
    unseen_zero: bool = True
    """In evaluation a key without a row reads zeros, not its initial value."""
    min_count: int = 1
    """A row is made in the update that is the `min_count`-th in which its key is met."""
    ttl: int | None = None
    """A row is evicted when not met for more than this many updates of the table."""
    max_rows: int | None = None
    """How many rows there are at most."""
    evict: Evict = Evict.RECENT
    """Which rows are evicted where there would be more than `max_rows`."""


class GroupKind(StrEnum):
    """What a dense group's values are, and so what a push of it means."""

    TRAINED = "trained"
    """float32 parameters with a rule; a push holds gradients."""
    FROZEN = "frozen"
    """float32 parameters without gradient; set by the initial step only."""
    AVERAGED = "averaged"
    """float32 buffers; a push holds new values, the step keeps their mean over samples."""
    LOWEST = "lowest"
    """int64 buffers; a push holds new values, the step keeps those of its lowest task."""


class ParameterSpec(msgspec.Struct, frozen=True):
    """A parameter or buffer inside a dense group; `dtype` is torch's name of its type in the model."""

    name: str
    shape: tuple[Count, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size


class Segment(NamedTuple):
    """The elements of one parameter that fall in a span of its group, as positions inside the span."""

    parameter: int
    start: int
    stop: int


class GroupSpec(msgspec.Struct, frozen=True):
    """Dense parameters or buffers kept as one flat array, in the order listed; `rule` for TRAINED only."""

    kind: GroupKind
    rule: RuleSpec | None
    parameters: tuple[ParameterSpec, ...]

    @property
    def size(self) -> int:
        """Number of elements of the flat array."""
        return sum(p.size for p in self.parameters)

    def segments(self, span: range) -> Iterator[Segment]:
        """The parameters of which elements fall in these of the flat array."""
        start = 0
        for number, parameter in enumerate(self.parameters):
            stop = start + parameter.size
            inside = range(max(start, span.start), min(stop, span.stop))
            if inside:
                yield Segment(number, inside.start - span.start, inside.stop - span.start)
            start = stop


class UpdateName(StrEnum):
    """The update rules of a job."""

    SYNC = "sync"
    ASYNC = "async"
    LOCAL_SGD = "local_sgd"


class UpdateSpec(msgspec.Struct, frozen=True):
    """How the pservers update: for `sync` the tasks of a step, for `async` the batches of a task.

    For `local_sgd` it is the tasks of a step, which is a round. What the options mean is said in `update.py`.
    """

    name: UpdateName
    batches: OneOrMore
    backup_after_s: float | None = None
    drop_after_s: float | None = None
    max_staleness: Count | None = None
    push_every: OneOrMore = 1
    pull_every: OneOrMore = 1
    local_steps: OneOrMore = 1
    keep_inner_state: bool = False

    @property
    def is_sync(self) -> bool:
        """Whether parameters change by commits: of steps, or of the rounds of `local_sgd`."""
        return self.name is not UpdateName.ASYNC


class Wire(StrEnum):
    """What a number of a row or of its gradient is on the wire; the pservers compute with float32 in any case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return 4 if self is Wire.FLOAT32 else 2


class Schema(msgspec.Struct, frozen=True):
    """What all trainers of a job must agree on.

    `rates` are the learning rates of trained groups, then of tables; None for one that is a function of the step.
    In `local_sgd` the rules of groups and tables are the outer one, whose rate comes last in `rates`; `inner` are the
    trainers' own rules, of trained groups, then of tables.
    """

    seed: int
    update: UpdateSpec
    tables: tuple[TableSpec, ...]
    groups: tuple[GroupSpec, ...]
    wire: Wire = Wire.FLOAT32
    rates: tuple[float | None, ...] = ()
    inner: tuple[RuleSpec, ...] = ()


class DataSpec(msgspec.Struct, frozen=True):
    """A dataset as the master knows it."""

    samples: Count
    fingerprint: str
    batch_size: OneOrMore


class Source(msgspec.Struct, frozen=True):
    """A checkpoint to restore from. `warm`: take rows and dense values, and begin with version 0 of epoch 0."""

    url: str
    serial: int
    warm: bool = False


class CheckpointSpec(msgspec.Struct, frozen=True):
    """Where checkpoints go, when they are made besides the first and that of each epoch's end, and how many stay."""

    url: str
    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 3
