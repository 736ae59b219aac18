"""Whether two trainers train the same model."""

import msgspec

from evergrad.init_rows import Initializer
from evergrad.messages import GroupSpec, Schema, TableSpec, UpdateSpec
from evergrad.optim import RuleSpec


def difference(first: Schema, other: Schema) -> str | None:
    """What differs between the job's model and another trainer's, in one sentence; None if nothing does."""
    found = _difference(first, other)
    if found is None:
        return None
    return f"this trainer's model is not the job's: {found}; run the same script with the same arguments everywhere"


def refuse_checkpoint(saved: Schema, model: Schema, name: str, is_warm: bool) -> str | None:
    """Why this model cannot go on with a checkpoint, in one sentence; None if it can.

    Learning rates may be others. A warm start needs the same tables and parameters only, whose rules have the same
    state.
    """
    same = msgspec.structs.replace(saved, rates=model.rates, wire=model.wire)
    if is_warm:
        same = msgspec.structs.replace(same, update=model.update, seed=model.seed)
    found = _difference(same, model)
    if found is None:
        return None
    found = found.replace("the job's", "the checkpoint's")
    anew = "without warm_start" if is_warm else "in another place, or with evergrad run --resume never"
    return f"checkpoint {name} is not of this model: {found}; run the script that made it, or begin anew {anew}"


def _difference(first: Schema, other: Schema) -> str | None:
    if first.seed != other.seed:
        return f"its seed is {other.seed}, the job's {first.seed}"
    if first.update != other.update:
        theirs, ours = _update(other.update, first.update), _update(first.update, other.update)
        return f"its update rule is {theirs}, the job's {ours}"
    if first.wire != other.wire:
        return f"its wire is {other.wire}, the job's {first.wire}"
    found = _tables(first.tables, other.tables) or _groups(first.groups, other.groups) or _inner(first, other)
    return found or _rates(first, other)


def _update(one: UpdateSpec, other: UpdateSpec) -> str:
    """An update rule as far as it differs from another: "local_sgd with local_steps 4"."""
    fields = [f for f in UpdateSpec.__struct_fields__[1:] if getattr(one, f) != getattr(other, f)]
    options = ", ".join(f"{field} {getattr(one, field)}" for field in fields)
    return f"{one.name} with {options}" if options else str(one.name)


def _inner(first: Schema, other: Schema) -> str | None:
    if first.inner == other.inner:
        return None
    ours, theirs = (", ".join(str(_shown(rule)) for rule in schema.inner) for schema in (first, other))
    return f"its own (inner) rules are {theirs or 'none'}, the job's {ours or 'none'}"


def _rates(first: Schema, other: Schema) -> str | None:
    if first.rates == other.rates:
        return None
    return f"its learning rates are {list(other.rates)}, the job's {list(first.rates)} (None: a function of the step)"


def _tables(first: tuple[TableSpec, ...], other: tuple[TableSpec, ...]) -> str | None:
    ours, theirs = {t.name: t for t in first}, {t.name: t for t in other}
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            return f"it lacks table {name!r}"
        if name not in ours:
            return f"it has a table {name!r} more"
        for field in TableSpec.__struct_fields__:
            mine, its = getattr(ours[name], field), getattr(theirs[name], field)
            if mine != its:
                return f"table {name!r} has {field} {_shown(its)}, the job's {_shown(mine)}"
    return None if first == other else "its tables come in another order"


def _groups(first: tuple[GroupSpec, ...], other: tuple[GroupSpec, ...]) -> str | None:
    ours = {p.name: (p, group) for group in first for p in group.parameters}
    theirs = {p.name: (p, group) for group in other for p in group.parameters}
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            return f"it lacks parameter {name!r}"
        if name not in ours:
            return f"it has a parameter {name!r} more"
        (mine, my_group), (its, its_group) = ours[name], theirs[name]
        if mine != its:
            return f"parameter {name!r} is {its.dtype} {list(its.shape)}, the job's {mine.dtype} {list(mine.shape)}"
        if (my_group.kind, my_group.rule) != (its_group.kind, its_group.rule):
            ours_is, theirs_is = (f"{g.kind} with rule {_shown(g.rule)}" for g in (my_group, its_group))
            return f"parameter {name!r} is {theirs_is}, the job's {ours_is}"
    return None if first == other else "its parameters come in another order"


def _shown(value: object) -> object:
    """A value as people write it: "adagrad(eps=1e-10)"."""
    if isinstance(value, RuleSpec):
        return f"{value.name}({', '.join(f'{name}={number:g}' for name, number in value.hyper.items())})"
    if isinstance(value, Initializer):
        return f"{value.name}({value.a:g}, {value.b:g})"
    return value
