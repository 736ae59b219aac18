"""A torch model bound to a job: its tables and dense groups, and what one batch does with them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from evergrad.checkpoint.model import DenseTensor
from evergrad.checkpoint.tensors import bytes_of
from evergrad.errors import ConfigError
from evergrad.job.alignment import aligned
from evergrad.job.dense import NotFinite, Rules, check_rules, fits, groups_of, patterns_of
from evergrad.job.held_rows import HeldRows
from evergrad.job.local import LocalModel
from evergrad.job.optimizer import JobOptimizer
from evergrad.job.rows import BatchRows
from evergrad.kernels.half import decoded, encoded
from evergrad.kernels.merge import all_finite
from evergrad.messages import (
    NEWEST,
    AnyArray,
    Floats,
    Generation,
    GroupKind,
    Keys,
    SyncTask,
    TableKeys,
    TableSpec,
    Wire,
)
from evergrad.nn import Table
from evergrad.optim import Rule, RuleSpec, learning_rate
from evergrad.trainer.exchange import Flow
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import PulledModel, RowGrads, SpanGrads, Void
from evergrad.update import LocalSGD


class Version(NamedTuple):
    """Which values a batch is computed with. `version` may be `NEWEST`."""

    generation: Generation
    version: int


class Requested(NamedTuple):
    """What a batch needs: its rows, which of their keys are on their way, and which dense groups, if any are."""

    at: Version
    rows: BatchRows
    wanted: list[tuple[int, Keys]]
    pulled: list[tuple[int, Keys]]
    groups: list[int]
    pulling: Flow[PulledModel] | None
    training: bool


class BoundModel:
    """The model of a job on this trainer.

    Args:
        session: the conversation with the job.
        model: the torch model.
        dense: rules for its parameters.
        sparse: rules for its tables.
        wire: what rows and gradients are on the wire.
        update: the update rule if steps are taken here first; `dense` and `sparse` are then the rules of these.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        dense: Rules | None,
        sparse: Rules | None,
        wire: Wire,
        update: LocalSGD | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"job.optimizer wants the model itself, a torch module, not a {type(model).__name__}")
        check_rules("dense", dense)
        check_rules("sparse", sparse)
        self.model = model
        _align(model)
        outer = update.outer if update is not None else None
        self.groups = groups_of(model, dense, outer)
        self._session, self._wire, self._update = session, wire, update
        self._modules = [m for m in model.modules() if isinstance(m, Table)]
        self._rules = _table_rules(self._modules, sparse)
        self.tables = _table_specs(self._modules, self._rules, outer)
        if not self.tables and not any(group.kind is GroupKind.TRAINED for group in self.groups):
            raise ConfigError("the model has nothing to train: no table, and no parameter that requires a gradient")
        self._numbers = {spec.name: number for number, spec in enumerate(self.tables)}
        self._held: Version | None = None
        self._values: dict[int, AnyArray] = {}
        self._rows: BatchRows | None = None
        self._local = self._local_model(update.keep_inner_state) if update is not None else None

    @property
    def local(self) -> LocalModel:
        """What a task of `LocalSGD` works on."""
        assert self._local is not None
        return self._local

    def inner_rules(self) -> tuple[RuleSpec, ...]:
        """The rules of the steps taken here, of trained groups, then of tables; none if there are no such steps."""
        rules = [g.rule for g in self.groups if g.rule is not None] + [rule for _, rule in self.table_rules()]
        return tuple(rule.spec() for rule in rules) if self._local is not None else ()

    def table_rules(self) -> list[tuple[str, Rule]]:
        """Each table's name and rule, in the order of tables."""
        return [(spec.name, self._rules[spec.name]) for spec in self.tables]

    def open(self, at: Version, batch: Any, training: bool) -> None:
        """Pull what a batch needs and put it into the model; raises as `enter`."""
        self.enter(self.request(at, self.rows_of(at, batch, training), training))

    def rows_of(self, at: Version, batch: Any, training: bool) -> BatchRows:
        """The rows that a batch needs, numbered. May be called in any thread."""
        rows = BatchRows(self._modules, self._numbers, self._puller(at, training), training)
        rows.number(batch)
        return rows

    def request(self, at: Version, rows: BatchRows, training: bool, held: HeldRows | None = None) -> "Requested":
        """Ask for what a batch needs; the answer may come while something else is computed.

        Args:
            at: which values.
            rows: of `rows_of` the batch.
            training: whether gradients are wanted.
            held: rows that are not asked for again, and what is asked for is added to; with the first of its batches
                dense groups are asked for, with the others none. They find the values of the batch before.
        """
        is_begun = held is not None and held.begin()
        wanted, groups = rows.wanted(held), [] if is_begun else self._groups_to_pull(at)
        local = self._overlay(training)
        keys = wanted if local is None else local.missing(wanted)
        flow = self._session.trainer.pull(at.generation, at.version, keys, groups, evaluating=not training)
        pulling = self._session.driver.start(flow) if keys or groups else None
        return Requested(at, rows, wanted, keys, groups, pulling, training)

    def enter(self, requested: "Requested") -> None:
        """Put what was asked for into the model. No gradient is left from another batch.

        Raises:
            Void: the version has passed.
        """
        at, rows, wanted, keys, groups, pulling, training = requested
        pulled: list[Floats] = []
        if pulling is not None:
            _, pulled, of_groups = self._session.driver.run(pulling)
            self._values.update(zip(groups, of_groups, strict=True))
        local = self._overlay(training)
        if local is not None:
            self._take_into(local, keys, pulled)
            pulled = [local.rows(table, of_table) for table, of_table in wanted]
        rows.take(pulled)
        self._held, self._rows = at, rows
        for number, group in enumerate(self.groups):
            if group.kind is not GroupKind.FROZEN or number in groups:
                group.load(self._dense(number, training))
            if training:
                group.zero_grad()
        self._read_from(rows)

    def close(self) -> None:
        """The batch is done: its rows are let go."""
        self._rows = None
        self._read_from(None)

    def zero_grad(self) -> None:
        """Forget the gradients of rows."""
        if self._rows is not None:
            self._rows.zero_grad()

    def contribution(
        self, optimizer: JobOptimizer, encode: bool = True, keep: bool = False
    ) -> tuple[list[RowGrads], list[SpanGrads]]:
        """The gradients of the open batch and the buffers it changed.

        Args:
            optimizer: knows the learning rates.
            encode: whether gradients of rows are to be as the job's wire has them, else float32.
            keep: whether the next batch, if it does not pull dense groups, finds buffers as this one has left them.

        Raises:
            NotFinite: there is NaN or infinity among them, or would be on the wire.
        """
        rows, spans = self._gradients(optimizer, keep)
        sent = self._encoded(rows, "the gradient")
        return sent if encode else rows, spans

    def step_locally(self, optimizer: JobOptimizer, samples: int, evict: Sequence[TableKeys]) -> None:
        """Take a step with the gradients of the open batch here; the model and the batch's rows show it at once.

        Raises:
            NotFinite: there is NaN or infinity among the gradients; no step was taken.
        """
        rows, spans = self._gradients(optimizer)
        for r in rows:
            self._check_finite(r.table, r.grads, "the gradient")
        assert self._rows is not None
        self.local.step(rows, spans, samples)
        self.local.evict += evict
        self._rows.renew(self.local.rows)
        for number, group in enumerate(self.groups):
            if group.kind is GroupKind.TRAINED:
                group.load(self.local.dense(number))

    def push_difference(self, task: SyncTask) -> bool:
        """Push what the steps taken here have made of the model; returns False if there was no step.

        Raises:
            NotFinite: there is NaN or infinity among it.
            Void, PushRefused: as `Trainer.push`.
        """
        local = self.local
        if not local.samples:
            return False
        assert self._update is not None
        rows, spans = local.difference(learning_rate(self._update.outer.lr, task.step))
        for span in spans:
            self.groups[span.group].check_finite(span.values, "the difference of")
        trainer, rows = self._session.trainer, self._encoded(rows, "the difference")
        push = trainer.push(task, task.step, task.index, local.samples, rows, spans, local.evict)
        self._session.driver.run(push)
        return True

    def _gradients(self, optimizer: JobOptimizer, keep: bool = False) -> tuple[list[RowGrads], list[SpanGrads]]:
        assert self._rows is not None
        of_groups, of_tables = optimizer.rates()
        rows = [RowGrads(g.table, of_tables[g.table], g.keys, g.grads) for g in self._rows.gradients()]
        spans = []
        rates = iter(of_groups)
        for number, group in enumerate(self.groups):
            lr = next(rates) if group.kind is GroupKind.TRAINED else 0.0
            if group.kind is GroupKind.FROZEN:
                group.refuse_gradients()
                continue
            values, present = (
                group.gradients() if group.kind is GroupKind.TRAINED else group.changed(self._dense(number, True))
            )
            if present.any():
                spans.append(SpanGrads(number, lr, values, present))
        if keep:
            buffers = (s.group for s in spans if self.groups[s.group].kind is not GroupKind.TRAINED)
            self._values.update({number: self.groups[number].values() for number in buffers})
        return rows, spans

    def _encoded(self, rows: Sequence[RowGrads], what: str) -> list[RowGrads]:
        """The same as the job's wire has them."""
        sent = [r._replace(grads=encoded(r.grads, self._wire)) for r in rows]
        for r in sent:
            self._check_finite(r.table, decoded(r.grads, self._wire), what)
        return sent

    def _check_finite(self, table: int, grads: Floats, what: str) -> None:
        if not all_finite(grads.reshape(-1)):
            raise NotFinite(f"{what} of table {self.tables[table].name!r}")

    def keys_of(self, table: str, ids: Tensor) -> TableKeys:
        """The different keys that these ids of a table are.

        Raises:
            ConfigError: there is no such table, or these are no ids.
        """
        if table not in self._numbers:
            raise ConfigError(
                f"there is no table {table!r}; the model's tables are {', '.join(self._numbers) or 'none'}"
            )
        if getattr(ids, "dtype", None) not in (torch.int64, torch.int32):
            raise ConfigError(f"table {table!r}: the ids are no tensor of int64 or int32; give torch.tensor([...])")
        return TableKeys(self._numbers[table], np.unique(ids.detach().cpu().to(torch.int64).numpy()))

    def initial(self) -> list[SpanGrads]:
        """The dense values the model was made with."""
        every = [np.ones(len(group.tensors), np.uint8) for group in self.groups]
        return [
            SpanGrads(i, 0.0, g.values(), flags) for i, (g, flags) in enumerate(zip(self.groups, every, strict=True))
        ]

    def initial_digest(self) -> str:
        """A digest of the dense values the model was made with."""
        digest = hashlib.blake2b(digest_size=8)
        for group in self.groups:
            digest.update(group.values().tobytes())
        return digest.hexdigest()

    def dense_at(self, at: Version) -> list[DenseTensor]:
        """Parameters and buffers of a version, in the types the model has."""
        self.open(at, None, training=False)
        self.close()
        named = ((p, t) for g in self.groups for p, t in zip(g.spec.parameters, g.tensors, strict=True))
        return [DenseTensor(p.name, p.dtype, p.shape, _bytes_of(t)) for p, t in named]

    def _read_from(self, rows: BatchRows | None) -> None:
        for module in self._modules:
            object.__setattr__(module, "source", rows)  # torch's own takes microseconds to see that it is no parameter

    def _groups_to_pull(self, at: Version) -> list[int]:
        """Nothing that is here already: not a version twice, and frozen parameters once a generation."""
        held = self._held
        if held == at and at.version != NEWEST:
            return []
        is_new = held is None or held.generation != at.generation
        return [i for i, g in enumerate(self.groups) if is_new or g.kind is not GroupKind.FROZEN]

    def _overlay(self, training: bool) -> LocalModel | None:
        """Where a batch's values are before they are in the model: in training with steps taken here, in a copy."""
        return self._local if training else None

    def _take_into(self, local: LocalModel, keys: Sequence[tuple[int, Keys]], pulled: Sequence[Floats]) -> None:
        for (table, of_table), values in zip(keys, pulled, strict=True):
            local.take_rows(table, of_table, values)
        if not local.has_values:
            local.take_dense([self._values[number] for number in range(len(self.groups))])

    def _dense(self, group: int, training: bool) -> AnyArray:
        """What a dense group is before the present batch."""
        local = self._overlay(training)
        return self._values[group] if local is None else local.dense(group)

    def _local_model(self, keeps_state: bool) -> LocalModel:
        tables = [(spec.dim, self._rules[spec.name].spec()) for spec in self.tables]
        groups = [replace(g.spec, rule=g.rule.spec()) if g.rule is not None else g.spec for g in self.groups]
        return LocalModel(tables, groups, keeps_state)

    def _puller(self, at: Version, training: bool) -> Callable[[int, Keys], Floats]:
        """Pulls rows met only in `forward`. Where the version has passed, the batch is void already: any will do."""

        def pull(table: int, keys: Keys) -> Floats:
            run, trainer = self._session.driver.run, self._session.trainer
            wanted = [(table, keys)]
            try:
                return run(trainer.pull(at.generation, at.version, wanted, [], not training)).rows[0]
            except Void as void:
                generation = void.generation
            try:
                return run(trainer.pull(generation, NEWEST, wanted, [], not training)).rows[0]
            except Void:  # the pservers of this generation are gone, or not there yet
                return np.zeros((keys.size, self.tables[table].dim), np.float32)

        local = self._overlay(training)
        if local is None:
            return pull

        def pull_missing(table: int, keys: Keys) -> Floats:
            for _, missing in local.missing([(table, keys)]):
                local.take_rows(table, missing, pull(table, missing))
            return local.rows(table, keys)

        return pull_missing


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).clone().view(torch.uint8)
    return bytes_of(flat.numpy())


def _align(model: nn.Module) -> None:
    """Parameters and buffers that were made of other memory lie where that did; see `alignment.py`."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not isinstance(tensor, nn.parameter.UninitializedParameter):
            tensor.data = aligned(tensor.data)


def _table_rules(modules: Sequence[Table], rules: Rules | None) -> dict[str, Rule]:
    """The rule of each table: its own `optimizer`, or else the first of `sparse=` that fits."""
    own = _own_rules(modules)
    names = list(dict.fromkeys(m.table for m in modules))
    if rules is None and len(own) < len(names):
        lacks = next(name for name in names if name not in own)
        raise ConfigError(
            f"table {lacks!r} has no rule; give job.optimizer a sparse= rule, as eg.Adagrad(lr=0.05), or the table an"
            " optimizer="
        )
    patterns = patterns_of(rules)
    found = {name: next((p for p in patterns if fits(name, p)), None) for name in names if name not in own}
    for name, pattern in found.items():
        if pattern is None:
            raise ConfigError(f"table {name!r} fits no name or pattern of sparse=; add one for it, or '*' at the end")
    unknown = [p for p in patterns if isinstance(rules, Mapping) and not any(fits(name, p) for name in names)]
    if unknown:
        raise ConfigError(f"sparse= has a rule for {unknown[0]!r}; the model's tables are {', '.join(names) or 'none'}")
    return own | {name: patterns[pattern] for name, pattern in found.items() if pattern is not None}


def _own_rules(modules: Sequence[Table]) -> dict[str, Rule]:
    own: dict[str, Rule] = {}
    for m in modules:
        if m.optimizer is not None and own.setdefault(m.table, m.optimizer) != m.optimizer:
            raise ConfigError(
                f"two modules share table {m.table!r} but not its optimizer; give both the same, or one of them none"
            )
    return own


def _table_specs(modules: Sequence[Table], rules: Mapping[str, Rule], outer: Rule | None) -> tuple[TableSpec, ...]:
    specs: dict[str, TableSpec] = {}
    for m in modules:
        spec = TableSpec(
            m.table, m.dim, (outer or rules[m.table]).spec(), m.init, m.unseen == "zeros",
            m.min_count, m.ttl, m.max_rows, m.evict,
        )  # fmt: skip
        first = specs.setdefault(m.table, spec)
        if first != spec:
            raise ConfigError(
                f"two modules share table {m.table!r} but not its dim, init, unseen and policy;"
                " make them alike or rename one"
            )
    return tuple(specs.values())
