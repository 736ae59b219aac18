"""What must hold at the end of a run under `Sync`: the bits, and which samples count in which step."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from evergrad.schedule import sync_task

from .arithmetic import Batch, contributes, initial_values, keys_of, samples
from .faults import Kind
from .oracle import Call, contents, expected
from .plan import APPLIED, COUNTED, Plan
from .whole import Whole, differing, frozen_values

if TYPE_CHECKING:
    from .world import World


def judge(world: "World") -> tuple[Callable[[Call], dict], dict[Call, np.ndarray]] | None:
    """Find what is wrong with a run; returns what was to be saved and found in evaluations, if that is known."""
    steps = _steps_by_epoch(world)
    if world.faults:
        return None
    if world.plan.is_dense:
        _judge_applied(world, steps)
    _judge_counts(world, steps)
    reference = expected(world.plan, steps, frozen_values(world)[0])
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
    return steps == leave.batch + contributes(plan, _batches(plan, epoch, leave.batch, 0)[0])


def _batches(plan: Plan, epoch: int, step: int, version: int) -> dict[int, Batch]:
    """The batches of a step of an epoch."""
    e, found = plan.epochs[epoch], {}
    for index in range(plan.update.batches):
        start, stop = sync_task(e.samples, plan.update.batches, e.batch_size, step, index)
        if start < stop:
            found[index] = Batch(epoch, version, samples(plan, epoch, start, stop))
    return found


def _each_step(plan: Plan, steps: tuple[int, ...]) -> Iterator[tuple[int, dict[int, Batch]]]:
    """Every version and the batches that count in its step."""
    version = 0
    for epoch in plan.visited():
        for step in range(steps[epoch]):
            batches = _batches(plan, epoch, step, version)
            yield version, {index: batch for index, batch in batches.items() if contributes(plan, batch)}
            version += 1


def _judge_applied(world: "World", steps: tuple[int, ...]) -> None:
    """A step's mean over its samples is one here, whatever the batches, and is applied once to every element."""
    counted = sum(bool(batches) for _, batches in _each_step(world.plan, steps))
    applied = Whole(world.pservers).span(APPLIED) - initial_values(world.plan)[APPLIED].values
    if set(applied.tolist()) != {float(counted)}:
        world.fault(Kind.BITS, f"of {counted} steps the elements of the dense parameters had {applied.tolist()}")


def _judge_counts(world: "World", steps: tuple[int, ...]) -> None:
    """A step applies one attempt of each of its tasks; a sample's row has its share of the step's mean."""
    plan, rows = world.plan, {}
    table = plan.tables.index(COUNTED) if COUNTED in plan.tables else None
    for version, batches in _each_step(plan, steps):
        chosen = world.watch.commits[0, version]
        tasks = [world.watch.tasks[attempt] for _, attempt in chosen]
        named = [(t.step, t.index) for t in tasks]
        if named != [(version, index) for index in batches] or [index for index, _ in chosen] != list(batches):
            world.fault(Kind.COUNT, f"step {version} is made of {named}, not of the tasks {list(batches)}")
        total = sum(batch.ids.size for batch in batches.values())
        for batch in batches.values():
            share = float(np.float32(batch.ids.size / total))
            rows |= {key: share for number, keys in keys_of(plan, batch) if number == table for key in keys.tolist()}
    found = rows if table is None else Whole(world.pservers).counts(table)
    if found != rows:
        world.fault(Kind.COUNT, f"rows that count samples: {differing(found, rows)}")
