"""Whole jobs that are hurt keep their promises, whatever the network, the processes and their scripts do.

What is checked during and after every run is in `watch.py`, `bounds.py` and `judge.py`; `make simulate` runs more.
"""

from dataclasses import replace

import msgspec
import pytest

from evergrad.messages import UpdateName, UpdateSpec, Wire

from .plan import COUNTED, POLICIES, Epoch, Leave, Plan, Raise, SavePlan
from .world import CALM, Schedule, Trouble, World

SCHEDULES = 100
SAVED_SCHEDULES = 60
OF_EACH = 3
OF_EACH_SAVED = 2
PLANS = {
    "sync": Plan(UpdateSpec(UpdateName.SYNC, 3)),
    "async": Plan(UpdateSpec(UpdateName.ASYNC, 3)),
    "local_sgd": Plan(UpdateSpec(UpdateName.LOCAL_SGD, 3, local_steps=2)),
}
QUIET = Epoch(evaluations=())

SHAPES = {
    "a model is saved where nothing was evaluated": {"epochs": (replace(QUIET, saves=2), QUIET)},
    "nothing is evaluated or saved": {"epochs": (QUIET, QUIET), "last_saves": 0},
    "evaluations and savings follow each other": {"epochs": (Epoch(evaluations=((9, 2), (5, 1)), saves=2),) * 2},
    "an evaluation has no samples": {"epochs": (Epoch(evaluations=((0, 3), (1, 20))),) * 2},
    "the model has tables only": {"is_dense": False},
    "the model has no tables": {"tables": ()},
    "pushes and pulls are cut into many messages": {"message_bytes": 48},
    "pushes are cut and the model has tables only": {"message_bytes": 48, "is_dense": False},
    "one pserver refuses some pushes": {"poison": True},
    "one pserver refuses parts of some pushes": {"poison": True, "message_bytes": 48},
    "some batches contribute nothing": {"skips": True, "reads_before_skipping": True},
    "some batches are not even read": {"skips": True, "batches": 1},
    "epochs have data of other sizes": {
        "epochs": (Epoch(30, 3), Epoch(1, 1), Epoch(0, 2), Epoch(16, 5)),
        "loops": (4,),
    },
    "a batch is larger than the data": {"epochs": (Epoch(7, 50), Epoch(3, 4))},
    "scripts leave an epoch before a step": {"epochs": (Epoch(leave=Leave(2, False)), Epoch())},
    "scripts leave an epoch after a step": {"epochs": (Epoch(leave=Leave(1, True)), Epoch())},
    "scripts leave their loop over epochs": {
        "epochs": (Epoch(), Epoch(), Epoch()),
        "loops": (2, 1),
        "leaves_epochs": 0,
    },
    "there are two loops over epochs": {"epochs": (Epoch(), Epoch(), Epoch()), "loops": (1, 2)},
    "tables have policies and rows are deleted": {"tables": (COUNTED, *POLICIES)},
    "rows are met while computing only": {"pulls_late": True},
    "numbers are short on the wire": {"wire": Wire.BFLOAT16},
    "scripts begin with other values": {"differ_at_first": True},
    "steps have one task": {"batches": 1},
    "steps have many tasks": {"batches": 5},
    "late tasks are handed out again soon": {"backup_after_s": 0.3},
    "scripts raise in a batch": {"raises": Raise(0, 7)},
    "scripts raise in a batch of the last epoch": {"raises": Raise(1, 20), "backup_after_s": 0.5},
}
OF_ONE_RULE = {
    "sync whose steps do without late tasks": ("sync", {"drop_after_s": 0.4}),
    "sync whose late tasks are handed out again before that": ("sync", {"drop_after_s": 1.0, "backup_after_s": 0.3}),
    "async that pulls ahead": ("async", {"ahead": True}),
    "async with groups of batches": ("async", {"batches": 4, "push_every": 2}),
    "async with uneven groups": ("async", {"batches": 4, "push_every": 3, "ahead": True}),
    "async with groups that are cut and refused": ("async", {"push_every": 3, "poison": True, "message_bytes": 48}),
    "async with groups of which some batches contribute nothing": ("async", {"push_every": 3, "skips": True}),
    "async that pulls now and then": ("async", {"batches": 4, "pull_every": 3}),
    "async in which nobody is ahead": ("async", {"max_staleness": 0}),
    "async in which nobody is far ahead, in groups": ("async", {"max_staleness": 2, "push_every": 2, "ahead": True}),
    "async whose scripts raise in a group": (
        "async",
        {"batches": 5, "push_every": 2, "ahead": True, "raises": Raise(1, 3)},
    ),
    "async that is left in a group": ("async", {"push_every": 3, "epochs": (Epoch(leave=Leave(4, True)), Epoch())}),
    "local steps whose tasks have one batch": ("local_sgd", {"local_steps": 1}),
    "local steps that are left in a task": ("local_sgd", {"epochs": (Epoch(leave=Leave(0, True)), Epoch())}),
}


SAVED = {
    "every step is in a checkpoint, and one stays": SavePlan(every_steps=1, keep=1),
    "checkpoints are made now and then": SavePlan(every_s=1.0),
    "the script asks for checkpoints": SavePlan(is_asked=True),
    "the best checkpoint stays": SavePlan(every_steps=2, is_rated=True),
    "nobody asked for checkpoints": SavePlan(is_scratch=True),
}
LOST = {
    "pservers and masters die": Trouble(mean_s={"crash pserver": 4.0, "crash master": 4.0}),
    "whoever sends a message may die after it": Trouble(loss=0.05, slow=0.1, stab=0.03, lasts=True),
    "all die, and the job is run again": Trouble(mean_s={"crash all": 6.0, "run again": 6.0}),
    "storage fails again and again": Trouble(
        mean_s={"storage full": 2.0, "storage away": 5.0, "record away": 5.0, "crash pserver": 5.0, "crash all": 9.0}
    ),
}


def run(schedule):
    world = World(schedule).run()
    assert not world.faults, world.report()
    return world


def shaped(plan, changes):
    """A plan with these changes to it or to its update rule."""
    of_rule = {name: value for name, value in changes.items() if name in UpdateSpec.__struct_fields__}
    update = msgspec.structs.replace(plan.update, **of_rule)
    return replace(plan, update=update, **{name: v for name, v in changes.items() if name not in of_rule})


@pytest.mark.parametrize("rule", UpdateName)
def test_jobs_of_any_shape_that_are_hurt_keep_what_is_promised(seed, rule):
    for one in range(seed, seed + SCHEDULES):
        run(Schedule.drawn(one, rule, is_saved=False))


@pytest.mark.parametrize("rule", UpdateName)
def test_so_do_jobs_of_any_shape_that_lose_pservers_and_masters(seed, rule):
    for one in range(seed, seed + SAVED_SCHEDULES):
        run(Schedule.drawn(one, rule, is_saved=True))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("saves", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("trouble", LOST.values(), ids=LOST)
def test_so_do_jobs_with_checkpoints_where(seed, plan, saves, trouble):
    for one in range(seed, seed + OF_EACH_SAVED):
        run(Schedule.drawn(one, plan=replace(plan, checkpoints=saves), trouble=trouble))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_so_do_jobs_where(seed, plan, changes):
    for one in range(seed, seed + OF_EACH):
        run(Schedule.drawn(one, plan=shaped(plan, changes), is_saved=False))


@pytest.mark.parametrize(("name", "changes"), OF_ONE_RULE.values(), ids=OF_ONE_RULE)
def test_so_do_jobs_under(seed, name, changes):
    for one in range(seed, seed + OF_EACH):
        run(Schedule.drawn(one, plan=shaped(PLANS[name], changes), is_saved=False))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_job_that_nothing_happens_to_ends_as_promised(plan):
    for pservers, trainers in ((1, 1), (3, 4), (9, 2)):
        world = run(Schedule(1, plan, pservers, trainers, CALM))
        assert not world.events
        assert world.clock.now_s < 60


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_so_does_a_job_with_checkpoints(plan):
    for pservers, trainers in ((1, 1), (3, 4), (9, 2)):
        world = run(Schedule(1, replace(plan, checkpoints=SavePlan(every_steps=2)), pservers, trainers, CALM))
        assert not world.events
        assert len(world.watch.moments.whole) > 2
        assert world.clock.now_s < 60
