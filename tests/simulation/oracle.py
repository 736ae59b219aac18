"""What a job under `Sync` must end with: its steps computed one after the other, with no job, no messages and no time.

What is shared with the job is the arithmetic of a step (`pserver/model.py`), which has tests of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evergrad.kernels.half import decoded, encoded
from evergrad.messages import ExportPart, GroupGrads, TableGrads
from evergrad.pserver.model import Contribution, Model
from evergrad.schedule import eval_task, eval_tasks, sync_task

from .arithmetic import (
    Batch,
    Gradients,
    batches_of,
    evaluated,
    evaluated_keys,
    gradients,
    initial_values,
    is_skipped,
    keys_of,
    samples,
)
from .local import local_model, step_locally
from .plan import OUTER_RATE, Plan

PARTS = (ExportPart.KEYS, ExportPart.VALUES)
Call = tuple[int, int]
"""A place in the script and the number of the call there, of evaluations and savings."""


@dataclass(frozen=True)
class Expected:
    """What comes out: the last model, and by place of the script the models and the totals there may be."""

    final: dict
    models: dict[int, dict]
    totals: dict[Call, np.ndarray]


@lru_cache(maxsize=64)
def expected(plan: Plan, steps: tuple[int, ...], counted: tuple[tuple[int, ...], ...], frozen: float) -> Expected:
    """What a job of this plan ends with.

    Args:
        steps: how many steps each epoch had.
        counted: the tasks that counted in each of them, over all epochs.
        frozen: what is added to the frozen values with which it began.
    """
    model = Model(plan.schema, 0, 1)
    model.set_dense(_span(s) for s in initial_values(plan, frozen))
    models, totals, version = {}, {}, 0
    for epoch in plan.visited():
        for step in range(steps[epoch]):
            first = plan.first_of_path(epoch, steps) + step * plan.update.local_steps
            tasks = tasks_of(plan, epoch, step, first if plan.is_local else version)
            _take_step(model, plan, [tasks[index] for index in counted[version]], plan.is_left(epoch, step))
            version += 1
        models[epoch] = contents(model, plan)
        for ordinal, (count, size) in enumerate(plan.epochs[epoch].evaluations):
            totals[epoch, ordinal] = totals_of(model, plan, epoch, count, size)
    final = contents(model, plan)
    return Expected(final, models | {len(plan.epochs): final}, totals)


def contents(model: Model, plan: Plan) -> dict:
    """All of a whole model, in the form in which scripts save it."""
    tables = {
        (number, part): model.export(number, part, 0, 1 << 40)[0].tobytes()
        for number in range(len(plan.schema.tables))
        for part in PARTS
    }
    return tables | {number: model.span(number).tobytes() for number in range(len(plan.schema.groups))}


def totals_of(model: Model, plan: Plan, epoch: int, count: int, size: int) -> np.ndarray:
    """The totals of an evaluation of `count` samples, added up task by task."""
    found = []
    for task in range(eval_tasks(count, size)):
        keys = evaluated_keys(plan, epoch, *eval_task(count, size, task))
        found.append(evaluated([_pulled(model, plan, *k, True) for k in keys], _groups(model, plan)))
    total = found[0] if found else np.zeros(0)
    for part in found[1:]:
        total = total + part
    return total


def tasks_of(plan: Plan, epoch: int, step: int, number: int) -> dict[int, Batch]:
    """The tasks of a step of an epoch, as batches of this number."""
    found = {}
    for index in range(plan.update.batches):
        start, stop = sync_task(plan.epochs[epoch].samples, plan.update.batches, plan.task_samples(epoch), step, index)
        if start < stop:
            found[index] = Batch(epoch, number, samples(plan, epoch, start, stop))
    return found


def _take_step(model: Model, plan: Plan, tasks: Sequence[Batch], is_left: bool) -> None:
    found = [_local(model, plan, task, is_left) if plan.is_local else _gradients(model, plan, task) for task in tasks]
    parts = []
    for count, (rows, spans, evict) in found:
        of_tables = [TableGrads(r.table, r.lr, r.keys, decoded(encoded(r.grads, plan.wire), plan.wire)) for r in rows]
        parts.append(Contribution(count, of_tables, [_span(s) for s in spans], evict))
    if parts:
        model.update(parts)


def _gradients(model: Model, plan: Plan, task: Batch) -> tuple[int, Gradients]:
    rows = [_pulled(model, plan, *k, False) for k in keys_of(plan, task)]
    return task.ids.size, gradients(plan, task, rows, _groups(model, plan))


def _local(model: Model, plan: Plan, task: Batch, is_left: bool) -> tuple[int, Gradients]:
    """What a trainer's own steps come to, or the first of them where scripts leave the epoch after it."""
    local = local_model(plan)
    for batch in batches_of(plan, task)[: 1 if is_left else None]:
        if not is_skipped(plan, batch):
            keys = keys_of(plan, batch)
            for table, missing in local.missing(keys):
                local.take_rows(table, missing, _pulled(model, plan, table, missing, False))
            if not local.has_values:
                local.take_dense(_groups(model, plan))
            step_locally(plan, local, batch)
    return local.samples, Gradients(*local.difference(OUTER_RATE), local.evict)


def _pulled(model: Model, plan: Plan, table: int, keys: np.ndarray, evaluating: bool) -> np.ndarray:
    return decoded(encoded(model.rows(table, keys, evaluating), plan.wire), plan.wire)


def _groups(model: Model, plan: Plan) -> list[np.ndarray]:
    return [model.span(number) for number in range(len(plan.schema.groups))]


def _span(s) -> GroupGrads:
    return GroupGrads(s.group, s.lr, s.values, s.present)
