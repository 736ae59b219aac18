"""Whole jobs that are hurt keep their promises, whatever the network and the trainers do."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from evergrad.messages import UpdateName, UpdateSpec

from .script import Plan
from .world import CALM, World

SYNC = Plan(UpdateSpec(UpdateName.SYNC, 3))
ASYNC = Plan(UpdateSpec(UpdateName.ASYNC, 3))
LOCAL = Plan(UpdateSpec(UpdateName.LOCAL_SGD, 2, local_steps=3))
SCHEDULES = 15


def run(plan, seed, pservers):
    world = World(plan, seed, pservers).run()
    assert not world.faults, world.report()
    return world


def seeds(first):
    return range(first, first + SCHEDULES)


@pytest.mark.parametrize("pservers", [1, 2, 3])
def test_a_sync_job_that_is_hurt_ends_with_the_bits_of_the_one_that_is_not(seed, pservers):
    for one in seeds(seed):
        run(SYNC, one, pservers)


@pytest.mark.parametrize("tasks", [1, 4])
def test_so_does_one_with_other_numbers_of_tasks_a_step(seed, tasks):
    for one in seeds(seed):
        run(replace(SYNC, update=UpdateSpec(UpdateName.SYNC, tasks)), one, 2)


def test_so_does_one_whose_tasks_are_handed_out_twice_early(seed):
    for one in seeds(seed):
        run(replace(SYNC, update=UpdateSpec(UpdateName.SYNC, 3, backup_after_s=0.3)), one, 2)


def test_so_does_one_whose_scripts_leave_an_epoch_early(seed):
    for one in seeds(seed):
        run(replace(SYNC, break_at=(0, 2)), one, 2)


@pytest.mark.parametrize("tasks", [1, 3])
def test_so_does_one_whose_scripts_pass_over_some_batches(seed, tasks):
    for one in seeds(seed):
        run(replace(SYNC, update=UpdateSpec(UpdateName.SYNC, tasks), skips=True), one, 2)


@pytest.mark.parametrize("pservers", [1, 2, 3])
@pytest.mark.parametrize("tasks", [1, 3])
def test_so_does_one_whose_trainers_take_steps_of_their_own(seed, tasks, pservers):
    for one in seeds(seed):
        run(replace(LOCAL, update=msgspec.structs.replace(LOCAL.update, batches=tasks)), one, pservers)


def test_so_does_one_whose_tasks_of_several_batches_are_handed_out_twice_early(seed):
    for one in seeds(seed):
        run(replace(LOCAL, update=msgspec.structs.replace(LOCAL.update, backup_after_s=0.5)), one, 2)


def test_so_does_one_that_passes_over_batches_of_its_tasks_and_leaves_an_epoch_early(seed):
    for one in seeds(seed):
        run(replace(LOCAL, skips=True), one, 2)
        run(replace(LOCAL, break_at=(0, 1)), one, 2)


@pytest.mark.parametrize("pservers", [1, 2, 3])
def test_an_async_job_that_is_hurt_applies_every_batch_once_on_every_pserver(seed, pservers):
    for one in seeds(seed):
        run(ASYNC, one, pservers)


def test_so_does_one_whose_async_tasks_are_handed_out_twice_early(seed):
    for one in seeds(seed):
        run(replace(ASYNC, update=UpdateSpec(UpdateName.ASYNC, 3, backup_after_s=0.5)), one, 2)


def test_more_trainers_than_tasks_and_more_pservers_than_values_make_no_difference():
    run(replace(SYNC, samples=3, batch_size=4), 1, 9)


def test_the_troubles_of_many_seeds_are_of_every_kind(seed):
    events, counters = Counter(), Counter()
    for one in seeds(seed):
        world = World(SYNC, one, 1).run()
        events += world.events
        counters += world.master.counters
    assert events.keys() >= {"crash", "freeze", "leave", "join", "lost"}
    assert counters["repeated requests"] > 0


def test_a_seed_is_replayed_exactly():
    first, second, other = (World(SYNC, seed, 2).run().trace for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_a_calm_run_is_not_hurt():
    world = World(SYNC, 0, 2, CALM).run()
    assert not world.faults, world.report()
    assert not world.events
