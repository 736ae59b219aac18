"""The simulation itself: what it does to a job, and that a seed does it again."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from evergrad.messages import UpdateName

from .mutations import MUTATIONS
from .network import Clock, Cut
from .plan import TABLES, Plan
from .trouble import CRASHES, STRIKES
from .world import Schedule, World

ROOT = Path(__file__).parents[2]
SEEDS = range(60)


def digest(seed):
    world = World(Schedule.drawn(seed)).run()
    return hashlib.sha256(repr(world.trace).encode()).hexdigest()


def test_a_seed_is_replayed_exactly():
    assert digest(3) == digest(3)
    assert digest(3) != digest(4)


def test_a_seed_is_replayed_exactly_by_another_process():
    code = f"from simulation.test_simulator import digest; print(digest({3}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(3)


def test_a_seed_has_the_same_schedule_where_its_rule_is_given():
    drawn = Schedule.drawn(5)
    assert Schedule.drawn(5, drawn.plan.update.name) == drawn


def test_a_failure_names_its_seed_and_the_command_that_shows_it_again():
    silent = next(m for m in MUTATIONS if m.breaks == "the status says who is waited for")
    world = next(w for seed in SEEDS if (w := World(silent.schedule(seed), silent.roles).run()).faults)
    again = f"tools/simulate.py --seed {world.schedule.seed} --rule sync --trace"
    assert again in world.report()
    assert str(world.faults[0]) in world.report()


def test_the_troubles_of_many_seeds_are_of_every_kind():
    events = sum((World(Schedule.drawn(seed)).run().events for seed in SEEDS), Counter())
    assert events.keys() - {"started again"} == {*STRIKES, *CRASHES, "stab", "lost", "doubled", "slow", "cut off"}


def test_the_plans_of_many_seeds_have_every_feature():
    schedules = [Schedule.drawn(seed) for seed in range(2000)]
    assert {s.pservers for s in schedules} == {1, 2, 3, 4}
    assert {s.trainers for s in schedules} == {1, 2, 3, 5}
    plans = [s.plan for s in schedules]
    assert {p.update.name for p in plans} == {*UpdateName}
    assert {name for p in plans for name in p.tables} == TABLES.keys()
    for field in fields(Plan):
        assert len({getattr(p, field.name) for p in plans}) > 1, field.name
    epochs = [e for p in plans for e in p.epochs]
    assert any(e.batch_size > e.samples > 0 for e in epochs)
    assert {e.leave.stepped for e in epochs if e.leave} == {True, False}


def test_a_cut_parts_those_inside_from_those_outside():
    both, one_way = (Cut(frozenset("ab"), 1.0, is_one_way) for is_one_way in (False, True))
    assert both.parts("a", "c")
    assert both.parts("c", "a")
    assert not both.parts("a", "b")
    assert not both.parts("c", "d")
    assert one_way.parts("a", "c")
    assert not one_way.parts("c", "a")


def test_time_goes_from_event_to_event():
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append(clock.now_s))
    clock.at(1.0, lambda: clock.at(0.5, lambda: seen.append(clock.now_s)))
    while clock.turn():
        pass
    assert seen == [1.5, 2.0]
