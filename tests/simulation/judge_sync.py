"""What must hold at the end of a run under `Sync`: the bits, and which samples count in which step."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from evergrad.messages import Request

from .arithmetic import Batch, batches_of, contributes, initial_values, is_skipped, keys_of, raises
from .faults import Kind
from .oracle import Call, contents, expected, tasks_of
from .plan import APPLIED, COUNTED, Plan
from .whole import Whole, differing, frozen_values

if TYPE_CHECKING:
    from .world import World


def judge(world: "World") -> tuple[Callable[[Call], dict], dict[Call, np.ndarray]] | None:
    """Find what is wrong with a run; returns what was to be saved and found in evaluations, if that is known."""
    steps = _steps_by_epoch(world)
    if world.faults:
        return None
    counted = _counted(world, steps)
    if world.faults:
        return None
    if world.plan.is_dense and not world.plan.is_local:
        _judge_applied(world, counted)
    _judge_rows(world, steps, counted)
    reference = expected(world.plan, steps, counted, frozen_values(world)[0])
    if contents(Whole(world.pservers), world.plan) != reference.final:
        world.fault(Kind.BITS, "the last version")
    return lambda call: reference.models[call[0]], reference.totals


def _steps_by_epoch(world: "World") -> tuple[int, ...]:
    """How many steps of each epoch were committed: the same on all pservers, and as many as there are."""
    watch, plan = world.watch, world.plan
    committed = sorted(step for place, step in watch.commits if place == 0)
    if committed != list(range(-1, len(committed) - 1)):
        world.fault(Kind.TORN, f"place 0 applied the steps {committed}")
    for (place, step), chosen in watch.commits.items():
        if watch.commits.get((0, step)) != chosen:
            world.fault(Kind.TORN, f"step {step} was applied differently at places 0 and {place}")
    if len(watch.commits) != world.places * len(committed):
        world.fault(Kind.TORN, "the pservers did not all apply the same steps")
    steps = Counter(watch.epoch_of[step] for step in committed if step >= 0)
    for epoch in plan.visited():
        if not _may_have(plan, epoch, steps[epoch]):
            world.fault(Kind.COUNT, f"epoch {epoch} had {steps[epoch]} steps")
    return tuple(steps[epoch] for epoch in range(len(plan.epochs)))


def _may_have(plan: Plan, epoch: int, steps: int) -> bool:
    """Whether so many steps of an epoch may be committed. Who leaves it after a step may be the last of that or not."""
    whole, leave = plan.steps(epoch), plan.epochs[epoch].leave
    if leave is None or leave.batch >= whole:
        return steps == whole
    if not leave.stepped:
        return steps == leave.batch
    if plan.update.batches > 1:
        return steps in (leave.batch, leave.batch + 1)
    only = tasks_of(plan, epoch, leave.batch, 0)[0]
    is_done = not is_skipped(plan, batches_of(plan, only)[0]) if plan.is_local else contributes(plan, only)
    return steps == leave.batch + is_done


def _each_step(plan: Plan, steps: tuple[int, ...]) -> Iterator[tuple[int, dict[int, Batch], bool]]:
    """Every version, the tasks of its step, and whether scripts leave the epoch in them."""
    version = 0
    for epoch in plan.visited():
        for step in range(steps[epoch]):
            yield version, tasks_of(plan, epoch, step, version), plan.is_left(epoch, step)
            version += 1


def _counted(world: "World", steps: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The tasks that count in each step: one attempt of each, but for those that a step may do without."""
    plan, may_drop = world.plan, world.plan.update.drop_after_s is not None
    counted, missing, left_out = [], 0, 0
    for version, tasks, is_left in _each_step(plan, steps):
        chosen = world.watch.commits[0, version]
        named = [(index, world.watch.tasks[attempt]) for index, attempt in chosen]
        if any((version, index) != (task.step, task.index) for index, task in named):
            world.fault(Kind.COUNT, f"step {version} names attempts of other tasks: {named}")
        indices = tuple(index for index, _ in chosen)
        wanted = tuple(index for index, task in tasks.items() if contributes(plan, task, is_left))
        is_part = may_drop and indices == tuple(index for index in wanted if index in indices)
        if indices != wanted and not is_part:
            world.fault(Kind.COUNT, f"step {version} is made of the tasks {indices}, not of {wanted}")
        left_out += sum(task.ids.size for task in tasks.values() if raises(plan, task))
        missing += sum(tasks[index].ids.size for index in wanted if index not in indices)
        counted.append(indices)
    status = world.master_process.master.status(Request(0), world.clock.now_s)
    is_exact = not (plan.skips or plan.poison or plan.raises)
    is_exact = is_exact and status.term == 1 and not world.era  # what was to be dropped when a master died, comes twice
    if missing > status.dropped or (status.dropped > missing and is_exact):
        world.fault(Kind.COUNT, f"{missing} samples are missing, and {status.dropped} are said to be")
    aside = sum(task.samples for task in status.set_aside)
    if aside != left_out and not (may_drop and aside == 0):
        world.fault(Kind.COUNT, f"{left_out} samples were left out by exceptions, and {aside} are said to be")
    return tuple(counted)


def _judge_applied(world: "World", counted: tuple[tuple[int, ...], ...]) -> None:
    """A step's mean over its samples is one here, whatever the batches, and is applied once to every element."""
    steps = sum(bool(tasks) for tasks in counted)
    applied = Whole(world.pservers).span(APPLIED) - initial_values(world.plan)[APPLIED].values
    if set(applied.tolist()) != {float(steps)}:
        world.fault(Kind.BITS, f"of {steps} steps the elements of the dense parameters had {applied.tolist()}")


def _judge_rows(world: "World", steps: tuple[int, ...], counted: tuple[tuple[int, ...], ...]) -> None:
    """A sample's row has its share of the mean of the one step in which it counts."""
    plan, rows = world.plan, {}
    if COUNTED not in plan.tables or plan.is_local:
        return
    table = plan.tables.index(COUNTED)
    for version, tasks, _ in _each_step(plan, steps):
        total = sum(tasks[index].ids.size for index in counted[version])
        for task in (tasks[index] for index in counted[version]):
            share = float(np.float32(task.ids.size / total))
            rows |= {key: share for number, keys in keys_of(plan, task) if number == table for key in keys.tolist()}
    found = Whole(world.pservers).counts(table)
    if found != rows:
        world.fault(Kind.COUNT, f"rows that count samples: {differing(found, rows)}")
