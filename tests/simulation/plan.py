"""What a simulated job trains: its model, its data and what its script does, given or drawn from a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from evergrad import init_rows
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    CheckpointSpec,
    DataSpec,
    Evict,
    GroupKind,
    GroupSpec,
    ParameterSpec,
    Schema,
    TableSpec,
    UpdateName,
    UpdateSpec,
    Wire,
)
from evergrad.optim import SGD, Adagrad, Adam, RuleSpec
from evergrad.schedule import sync_steps
from evergrad.trainer.trainer import NO_OFFER, Offer

from .storage import URL

SEED = 5
LARGE_BYTES = 1 << 20
FAR_KEYS = np.array([0, -1, 2**63 - 1, -(2**63), 77, 78, 79], np.int64)
CANDIDATES = np.arange(60_000)
OF_ONE_SLOT = CANDIDATES[slots_of(CANDIDATES) == slots_of(np.array([1]))[0]]
"""Keys that contend for the one row that `max_rows` leaves a slot."""


class TableKind(NamedTuple):
    """A table, which keys the samples of an epoch have in it, and what their gradients are.

    `counts`: each is -1 and the rule subtracts it, so that a row counts its updates.
    """

    spec: TableSpec
    keys: Callable[[int, np.ndarray], np.ndarray]
    counts: bool


def once_key(epoch: int, ids: np.ndarray) -> np.ndarray:
    """A key of its own for each sample of each epoch."""
    return ids * 1_000 + epoch


def _table(name: str, keys: Callable[[int, np.ndarray], np.ndarray], **policy) -> TableKind:
    return TableKind(TableSpec(name, 1, SGD().spec(), init_rows.zeros(), **policy), keys, True)


def _trained(name: str, dim: int, keys: Callable[[int, np.ndarray], np.ndarray], **policy) -> TableKind:
    return TableKind(TableSpec(name, dim, Adagrad().spec(), init_rows.normal(), **policy), keys, False)


TABLES = {
    kind.spec.name: kind
    for kind in (
        _trained("users", 2, lambda epoch, ids: FAR_KEYS[(ids * ids + 3) % FAR_KEYS.size]),
        _table("counts", once_key),
        _table("rare", lambda epoch, ids: ids % 5 - 2, min_count=3),
        _trained("brief", 1, lambda epoch, ids: ids % 11, ttl=2),
        _trained("recent", 1, lambda epoch, ids: OF_ONE_SLOT[ids % OF_ONE_SLOT.size], max_rows=1),
        _trained("often", 1, lambda epoch, ids: OF_ONE_SLOT[ids % 3], max_rows=1, evict=Evict.COUNT),
        _table("passing", once_key),
    )
}
COUNTED, PASSING = "counts", "passing"
POLICIES = ("rare", "brief", "recent", "often", PASSING)

TRAINED, APPLIED, AVERAGED, LOWEST, FROZEN = range(5)
BUFFERS = (AVERAGED, LOWEST)


def _group(kind: GroupKind, rule: RuleSpec | None, *sizes: int) -> GroupSpec:
    dtype = "int64" if kind is GroupKind.LOWEST else "float32"
    return GroupSpec(kind, rule, tuple(ParameterSpec(f"{kind}{i}{n}", (n,), dtype) for i, n in enumerate(sizes)))


OUTER = SGD(momentum=0.5, nesterov=True).spec()
"""The rule of the pservers in `LocalSGD`."""
OUTER_RATE = 0.75
GROUPS = (
    _group(GroupKind.TRAINED, Adam().spec(), 3, 4),
    _group(GroupKind.TRAINED, SGD().spec(), 6),
    _group(GroupKind.AVERAGED, None, 3),
    _group(GroupKind.LOWEST, None, 2),
    _group(GroupKind.FROZEN, None, 3),
)


class Leave(NamedTuple):
    """Scripts leave a loop over batches at this batch (of a stream or, in `Async`, of the epoch), or a later one.

    `stepped`: after the batch's step, not before it.
    """

    batch: int
    stepped: bool


class Raise(NamedTuple):
    """The script raises in every batch with this sample, in this epoch."""

    epoch: int
    sample: int


@dataclass(frozen=True)
class SavePlan:
    """A job's checkpoints.

    Attributes:
        every_steps, every_s: when they are made besides those that each job makes.
        keep: how many stay.
        is_asked: whether the script asks for one now and then.
        is_rated: whether the script's metrics choose a best one.
        is_scratch: they are made though nobody has asked for them; another job begins without them.
    """

    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 2
    is_asked: bool = False
    is_rated: bool = False
    is_scratch: bool = False

    @staticmethod
    def drawn(rng: random.Random) -> "SavePlan":
        return SavePlan(
            every_steps=rng.choice((None, 1, 2, 5)),
            every_s=rng.choice((None, None, 1.0, 4.0)),
            keep=rng.choice((1, 1, 2, 3)),
            is_asked=rng.random() < 0.3,
            is_rated=rng.random() < 0.3,
            is_scratch=rng.random() < 0.2,
        )


@dataclass(frozen=True)
class Epoch:
    """One epoch, and what the script does after its batches.

    `evaluations`: samples and batch size of each. `saves`: how often the model is saved.
    """

    samples: int = 23
    batch_size: int = 2
    leave: Leave | None = None
    evaluations: tuple[tuple[int, int], ...] = ((7, 3),)
    saves: int = 0

    @property
    def data(self) -> DataSpec:
        return DataSpec(self.samples, "simulated", self.batch_size)


@dataclass(frozen=True)
class Plan:
    """One job.

    Attributes:
        update: the update rule.
        epochs: all of them, over all loops.
        loops: how many epochs each loop over epochs has.
        leaves_epochs: in this epoch the script leaves its loop over epochs, after the batches.
        last_saves: how often the model is saved after all loops.
        tables: which of `TABLES` the model has.
        is_dense: whether it has dense parameters and buffers.
        wire: what numbers of rows are on the wire.
        message_bytes: larger pulls and pushes are cut.
        ahead: in `Async`, whether the next batch is pulled for while the present one is computed and pushed.
        pulls_late: rows are met while computing only, and pulled then.
        skips: some batches contribute nothing, as when the script calls no `step`.
        reads_before_skipping: a batch that contributes nothing is pulled for.
        poison: some batches have a gradient that one pserver refuses.
        differ_at_first: scripts begin with other dense values, of which those of one must be taken.
        raises: where the script raises; in no epoch that it leaves.
        checkpoints: how they are made, if they are.
    """

    update: UpdateSpec
    epochs: tuple[Epoch, ...] = (Epoch(), Epoch())
    loops: tuple[int, ...] = (2,)
    leaves_epochs: int | None = None
    last_saves: int = 1
    tables: tuple[str, ...] = ("users", COUNTED)
    is_dense: bool = True
    wire: Wire = Wire.FLOAT32
    message_bytes: int = LARGE_BYTES
    ahead: bool = False
    pulls_late: bool = False
    skips: bool = False
    reads_before_skipping: bool = False
    poison: bool = False
    differ_at_first: bool = False
    raises: Raise | None = None
    checkpoints: SavePlan | None = None

    @property
    def offer(self) -> Offer:
        """What a trainer says of checkpoints."""
        saves = self.checkpoints
        if saves is None or saves.is_scratch:
            return NO_OFFER
        return Offer(checkpoints=CheckpointSpec(URL, saves.every_steps, saves.every_s, saves.keep))

    @property
    def scratch(self) -> str | None:
        """Where checkpoints go if no trainer says so."""
        return URL if self.checkpoints is not None and self.checkpoints.is_scratch else None

    @property
    def is_sync(self) -> bool:
        return self.update.is_sync

    @property
    def may_differ(self) -> bool:
        """A step that an epoch is left in, or that does without late tasks, may be another when it is done again."""
        return self.update.drop_after_s is not None or any(epoch.leave for epoch in self.epochs)

    @property
    def is_local(self) -> bool:
        return self.update.name is UpdateName.LOCAL_SGD

    @cached_property
    def kinds(self) -> tuple[TableKind, ...]:
        return tuple(TABLES[name] for name in self.tables)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return GROUPS if self.is_dense else ()

    @cached_property
    def schema(self) -> Schema:
        """What is agreed on. In `LocalSGD` trainers take steps by the rules of the model; the pservers have another."""
        specs, groups = tuple(kind.spec for kind in self.kinds), self.groups
        if self.is_local:
            specs = tuple(msgspec.structs.replace(spec, rule=OUTER) for spec in specs)
            groups = tuple(msgspec.structs.replace(g, rule=OUTER) if g.rule is not None else g for g in groups)
        return Schema(SEED, self.update, specs, groups, self.wire)

    def task_samples(self, epoch: int) -> int:
        """How many samples a task of a step has, but for the last ones."""
        return self.epochs[epoch].batch_size * self.update.local_steps

    def steps(self, epoch: int) -> int:
        """Steps of an epoch that nobody leaves, in `Sync` and `LocalSGD`."""
        return sync_steps(self.epochs[epoch].samples, self.update.batches, self.task_samples(epoch))

    def is_left(self, epoch: int, step: int) -> bool:
        """Whether scripts leave an epoch in the tasks of this step."""
        leave = self.epochs[epoch].leave
        return leave is not None and step >= leave.batch

    def first_of_path(self, epoch: int, steps: tuple[int, ...]) -> int:
        """The number of an epoch's first batch along a path of tasks, if epoch e had `steps[e]` steps."""
        counted = 0
        for e in [e for e in self.visited() if e < epoch]:
            longest = sync_steps(self.epochs[e].samples, self.update.batches, self.epochs[e].batch_size)
            counted += min(steps[e] * self.update.local_steps, longest)
        return counted

    def first_batch(self, epoch: int) -> int:
        """The number of an epoch's first batch, in `Async`."""
        return sum(-(-e.samples // e.batch_size) for e in self.epochs[:epoch])

    def visited(self) -> list[int]:
        """The epochs that are begun."""
        first, visited = 0, []
        for count in self.loops:
            for epoch in range(first, first + count):
                visited.append(epoch)
                if epoch == self.leaves_epochs:
                    break
            first += count
        return visited

    @cached_property
    def work(self) -> int:
        """How many batches of any kind there are."""
        trained = sum(-(-e.samples // e.batch_size) for e in self.epochs)
        evaluated = sum(-(-samples // size) for e in self.epochs for samples, size in e.evaluations)
        return trained + evaluated + self.calls

    @cached_property
    def calls(self) -> int:
        """How many evaluations and savings there are."""
        return self.last_saves + sum(e.saves + len(e.evaluations) for e in self.epochs)

    @staticmethod
    def drawn(rng: random.Random, rule: UpdateName | None = None) -> "Plan":
        """A plan of any shape: most of its features are off in most plans, so that some are rare mixtures."""

        def rarely(value, otherwise, share=0.2):
            return value if rng.random() < share else otherwise

        name = rng.choice(tuple(UpdateName))  # drawn in any case, so that a seed's plan is the same if it is given
        update = _drawn_update(rng, name if rule is None else rule)
        epochs = tuple(_drawn_epoch(rng) for _ in range(rng.choice((1, 2, 2, 3))))
        split = rng.randint(1, len(epochs))
        loops = (split, len(epochs) - split) if split < len(epochs) and rng.random() < 0.5 else (len(epochs),)
        tables = [COUNTED, *rarely(["users"], [], 0.8), *rarely(rng.sample(POLICIES, rng.randint(1, 3)), [], 0.4)]
        rng.shuffle(tables)
        is_dense = rng.random() < 0.85
        return Plan(
            update=update,
            epochs=epochs,
            loops=loops,
            leaves_epochs=rarely(rng.randrange(len(epochs)), None, 0.1),
            last_saves=rng.choice((0, 0, 1, 1, 2)),
            tables=tuple(rarely([], tables, 0.1) if is_dense else tables),
            is_dense=is_dense,
            wire=rarely(rng.choice((Wire.BFLOAT16, Wire.FLOAT16)), Wire.FLOAT32),
            message_bytes=rarely(rng.choice((48, 150, 400)), LARGE_BYTES, 0.3),
            ahead=rng.random() < 0.5,
            pulls_late=rarely(True, False),
            skips=rarely(True, False),
            reads_before_skipping=rng.random() < 0.5,
            poison=rarely(True, False, 0.15),
            differ_at_first=rarely(True, False),
            raises=rarely(_drawn_raise(rng, epochs), None, 0.15),
        )


def _drawn_update(rng: random.Random, name: UpdateName) -> UpdateSpec:
    batches, backup_after_s = rng.choice((1, 2, 3, 3, 5)), rng.choice((None, None, 0.3, 1.0))
    if name is UpdateName.LOCAL_SGD:
        return UpdateSpec(name, min(batches, 3), backup_after_s, local_steps=rng.choice((1, 2, 3)))
    if name is UpdateName.SYNC:
        return UpdateSpec(name, batches, backup_after_s, drop_after_s=rng.choice((None, None, None, None, 0.5, 2.0)))
    return UpdateSpec(
        name,
        batches,
        backup_after_s,
        max_staleness=rng.choice((None, None, None, 0, 1, 3)),
        push_every=rng.choice((1, 1, rng.randint(1, batches))),
        pull_every=rng.choice((1, 1, rng.randint(1, batches))),
    )


def _drawn_raise(rng: random.Random, epochs: tuple[Epoch, ...]) -> Raise | None:
    number = rng.randrange(len(epochs))
    samples = epochs[number].samples
    return Raise(number, rng.randrange(samples)) if samples and epochs[number].leave is None else None


def _drawn_epoch(rng: random.Random) -> Epoch:
    samples, size = rng.choice((0, 1, 2, 7, 16, 23, 30)), rng.choice((1, 2, 3, 5, 50))
    size = max(size, samples // 12)
    leave = Leave(rng.randrange(4), rng.random() < 0.5) if rng.random() < 0.2 else None
    evaluations = tuple((rng.choice((0, 1, 5, 9)), rng.choice((2, 3, 20))) for _ in range(rng.choice((0, 1, 1, 2))))
    return Epoch(samples, size, leave, evaluations, rng.choice((0, 0, 0, 1, 2)))
