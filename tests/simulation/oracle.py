"""What a job under `Sync` must end with: its steps computed one after the other, with no job, no messages and no time.

What is shared with the job is the arithmetic of a step (`pserver/model.py`), which has tests of its own.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evergrad.kernels.half import decoded, encoded
from evergrad.messages import ExportPart, GroupGrads, TableGrads
from evergrad.pserver.model import Contribution, Model
from evergrad.schedule import eval_task, eval_tasks, sync_task

from .arithmetic import (
    Batch,
    contributes,
    evaluated,
    evaluated_keys,
    gradients,
    initial_values,
    keys_of,
    samples,
)
from .plan import Plan

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
def expected(plan: Plan, steps: tuple[int, ...], frozen: float) -> Expected:
    """What a job of this plan ends with, if it began with these values and epoch e had `steps[e]` steps."""
    model = Model(plan.schema, 0, 1)
    model.set_dense(_span(s) for s in initial_values(plan, frozen))
    models, totals, version = {}, {}, 0
    for epoch in plan.visited():
        for step in range(steps[epoch]):
            _take_step(model, plan, epoch, step, version)
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


def _take_step(model: Model, plan: Plan, epoch: int, step: int, version: int) -> None:
    e, parts = plan.epochs[epoch], []
    for index in range(plan.update.batches):
        start, stop = sync_task(e.samples, plan.update.batches, e.batch_size, step, index)
        batch = Batch(epoch, version, samples(plan, epoch, start, stop))
        if start == stop or not contributes(plan, batch):
            continue
        rows = [_pulled(model, plan, *k, False) for k in keys_of(plan, batch)]
        found = gradients(plan, batch, rows, _groups(model, plan))
        of_tables = [TableGrads(r.table, r.lr, r.keys, decoded(r.grads, plan.wire)) for r in found.rows]
        parts.append(Contribution(stop - start, of_tables, [_span(s) for s in found.spans], found.evict))
    if parts:
        model.update(parts)


def _pulled(model: Model, plan: Plan, table: int, keys: np.ndarray, evaluating: bool) -> np.ndarray:
    return decoded(encoded(model.rows(table, keys, evaluating), plan.wire), plan.wire)


def _groups(model: Model, plan: Plan) -> list[np.ndarray]:
    return [model.span(number) for number in range(len(plan.schema.groups))]


def _span(s) -> GroupGrads:
    return GroupGrads(s.group, s.lr, s.values, s.present)
