"""A torch model bound to a job: its tables and dense groups, and what one batch does with them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from evergrad.errors import ConfigError
from evergrad.job.alignment import aligned
from evergrad.job.dense import NotFinite, Rules, check_rules, fits, groups_of, patterns_of
from evergrad.job.optimizer import JobOptimizer
from evergrad.job.rows import BatchRows
from evergrad.kernels.half import as_seen, encoded
from evergrad.kernels.merge import all_finite
from evergrad.messages import NEWEST, AnyArray, Floats, Generation, GroupKind, Keys, TableKeys, TableSpec, Wire
from evergrad.nn import Table
from evergrad.optim import Rule
from evergrad.trainer.exchange import Flow
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import PulledModel, RowGrads, SpanGrads, Void


class Version(NamedTuple):
    """Which values a batch is computed with. `version` may be `NEWEST`."""

    generation: Generation
    version: int


class Requested(NamedTuple):
    """What was asked for a batch: its rows, dense groups by number, and the pull on its way, if there is any."""

    at: Version
    rows: BatchRows
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
    """

    def __init__(
        self, session: Session, model: nn.Module, dense: Rules | None, sparse: Rules | None, wire: Wire
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"job.optimizer wants the model itself, a torch module, not a {type(model).__name__}")
        check_rules("dense", dense)
        check_rules("sparse", sparse)
        self.model = model
        _align(model)
        self.groups = groups_of(model, dense)
        self._session, self._wire = session, wire
        self._modules = [m for m in model.modules() if isinstance(m, Table)]
        self._rules = _table_rules(self._modules, sparse)
        self.tables = _table_specs(self._modules, self._rules)
        if not self.tables and not any(group.kind is GroupKind.TRAINED for group in self.groups):
            raise ConfigError("the model has nothing to train: no table, and no parameter that requires a gradient")
        self._numbers = {spec.name: number for number, spec in enumerate(self.tables)}
        self._held: Version | None = None
        self._values: dict[int, AnyArray] = {}
        self._rows: BatchRows | None = None

    def table_rules(self) -> list[tuple[str, Rule]]:
        """Each table's name and rule, in the order of tables."""
        return [(spec.name, self._rules[spec.name]) for spec in self.tables]

    def open(self, at: Version, batch: Any, training: bool) -> None:
        """Pull what a batch needs and put it into the model; raises as `enter`."""
        self.enter(self.request(at, batch, training))

    def request(self, at: Version, batch: Any, training: bool) -> "Requested":
        """Ask for what a batch needs; the answer may come while something else is computed."""
        rows = BatchRows(self._modules, self._numbers, self._puller(at, training), training)
        wanted, groups = rows.wanted(batch), self._groups_to_pull(at)
        flow = self._session.trainer.pull(at.generation, at.version, wanted, groups, evaluating=not training)
        pulling = self._session.driver.start(flow) if wanted or groups else None
        return Requested(at, rows, groups, pulling, training)

    def enter(self, requested: "Requested") -> None:
        """Put what was asked for into the model. No gradient is left from another batch.

        Raises:
            Void: the version has passed.
        """
        at, rows, groups, pulling, training = requested
        if pulling is not None:
            pulled = self._session.driver.run(pulling)
            rows.take(pulled.rows)
            self._values.update(zip(groups, pulled.groups, strict=True))
        self._held, self._rows = at, rows
        for number, group in enumerate(self.groups):
            if group.kind is not GroupKind.FROZEN or number in groups:
                group.load(self._values[number])
            if training:
                group.zero_grad()
        for module in self._modules:
            module.source = rows

    def close(self) -> None:
        """The batch is done: its rows are let go."""
        self._rows = None
        for module in self._modules:
            module.source = None

    def zero_grad(self) -> None:
        """Forget the gradients of rows."""
        if self._rows is not None:
            self._rows.zero_grad()

    def contribution(self, optimizer: JobOptimizer) -> tuple[list[RowGrads], list[SpanGrads]]:
        """The gradients of the open batch and the buffers it changed.

        Raises:
            NotFinite: there is NaN or infinity among them.
        """
        assert self._rows is not None
        of_groups, of_tables = optimizer.rates()
        gradients = self._rows.gradients()
        rows = [RowGrads(g.table, of_tables[g.table], g.keys, encoded(g.grads, self._wire)) for g in gradients]
        for r in rows:
            if not all_finite(as_seen(r.grads, self._wire).reshape(-1)):
                raise NotFinite(f"the gradient of table {self.tables[r.table].name!r}")
        spans = []
        rates = iter(of_groups)
        for number, group in enumerate(self.groups):
            lr = next(rates) if group.kind is GroupKind.TRAINED else 0.0
            if group.kind is GroupKind.FROZEN:
                group.refuse_gradients()
                continue
            values, present = (
                group.gradients() if group.kind is GroupKind.TRAINED else group.changed(self._values[number])
            )
            if present.any():
                spans.append(SpanGrads(number, lr, values, present))
        return rows, spans

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

    def save_dense(self, path: Path, at: Version) -> None:
        """Write parameters and buffers of a version, in the types the model has."""
        self.open(at, None, training=False)
        self.close()
        named = {p.name: t for g in self.groups for p, t in zip(g.spec.parameters, g.tensors, strict=True)}
        save_file({name: t.detach().cpu().contiguous().clone() for name, t in named.items()}, path)

    def _groups_to_pull(self, at: Version) -> list[int]:
        """Nothing that is here already: not a version twice, and frozen parameters once a generation."""
        held = self._held
        if held == at and at.version != NEWEST:
            return []
        is_new = held is None or held.generation != at.generation
        return [i for i, g in enumerate(self.groups) if is_new or g.kind is not GroupKind.FROZEN]

    def _puller(self, at: Version, training: bool) -> Callable[[int, Keys], Floats]:
        """Pulls rows met only in `forward`. Where the version has passed, the batch is void already: any will do."""

        def pull(table: int, keys: Keys) -> Floats:
            run, trainer = self._session.driver.run, self._session.trainer
            wanted = [(table, keys)]
            try:
                return run(trainer.pull(at.generation, at.version, wanted, [], not training)).rows[0]
            except Void as void:
                return run(trainer.pull(void.generation, NEWEST, wanted, [], not training)).rows[0]

        return pull


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


def _table_specs(modules: Sequence[Table], rules: Mapping[str, Rule]) -> tuple[TableSpec, ...]:
    specs: dict[str, TableSpec] = {}
    for m in modules:
        spec = TableSpec(
            m.table, m.dim, rules[m.table].spec(), m.init, m.unseen == "zeros", m.min_count, m.ttl, m.max_rows, m.evict
        )
        first = specs.setdefault(m.table, spec)
        if first != spec:
            raise ConfigError(
                f"two modules share table {m.table!r} but not its dim, init, unseen and policy;"
                " make them alike or rename one"
            )
    return tuple(specs.values())
