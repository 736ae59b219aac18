"""What the options of update rules promise, and what holds when scripts raise, in jobs that are hurt."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from evergrad.master.pace import Pace
from evergrad.messages import (
    AsyncTask,
    ExportPart,
    Generation,
    GroupGrads,
    Request,
    TableGrads,
    TrainDone,
    UpdateName,
    UpdateSpec,
)
from evergrad.pserver.model import Contribution, Model
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.trainer import PulledModel, Trainer

from .script import APPLIED, COUNTS, PARTS, USERS, Plan, Script, count_key, initial_values
from .world import Roles, Trouble, World

ROUGH = Trouble(loss=0.1, duplicate=0.2, slow=0.15, mean_s={"crash": 2.0, "freeze": 2.0, "join": 2.0})
CALM_BUT_LATE = Trouble(loss=0.05, duplicate=0.1, slow=0.1)
SCHEDULES = 15


def asynchronous(**options):
    return Plan(UpdateSpec(UpdateName.ASYNC, 4, **options))


def seeds(first):
    return range(first, first + SCHEDULES)


def first_fault(make, schedules=60):
    """What worlds find first that `make` makes of seeds."""
    for seed in range(schedules):
        world = make(seed).run()
        if world.faults:
            return world.faults[0]
    pytest.fail(f"{schedules} schedules found nothing wrong")


def check(world):
    world.run()
    assert not world.faults, world.report()
    return world


# -- groups of batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("push_every", "pservers"), [(2, 1), (2, 3), (3, 2), (4, 2)])
def test_every_batch_of_a_group_is_applied_once_on_every_pserver(seed, push_every, pservers):
    for one in seeds(seed):
        check(World(asynchronous(push_every=push_every, backup_after_s=1.5), one, pservers))


class CountsOneBatchAPush(Pserver):
    def _push_batch(self, src, push, model, admission):
        answer = super()._push_batch(src, push, model, admission)
        if self._progress.get(push.task) == push.batch + push.batches:
            self._progress[push.task] = push.batch + 1
        return answer


def test_a_pserver_that_counts_a_group_as_one_batch_is_found():
    roles = Roles(pserver=CountsOneBatchAPush)
    assert first_fault(lambda seed: World(asynchronous(push_every=2), seed, 2, ROUGH, roles))


# -- bounded staleness -------------------------------------------------------------------------------------------------


class Watched:
    """Counts the batches that trainers have truly done, and compares them with the slowest's at each beginning."""

    def __init__(self, most):
        self.most, self.world, self.begun = most, None, 0
        self._base, self._done = {}, {}
        watched = self

        class Told(Trainer):
            def ask(self, want, done):
                if isinstance(done, TrainDone):
                    watched.has_done(self.member, done.attempt, None)
                return (yield from super().ask(want, done))

            def may_begin(self, task: AsyncTask, done: int):
                watched.has_done(self.member, task.attempt, done)
                yield from super().may_begin(task, done)
                watched.begins(self.member, task)

        self.trainer = Told

    def has_done(self, member, attempt, batches):
        """So many of an attempt, or all (None): nobody dies, so each is one's from its beginning on."""
        attempts = self._done.setdefault(member, {})
        if batches is not None:
            attempts[attempt] = batches
        elif attempt in attempts:
            attempts[attempt] += 1

    def begins(self, member, task):
        pace = self.world.master._script.training.epoch.pace
        if member not in pace._held:
            return
        self.begun += 1
        done = {m: self._total(m, held) for m, held in pace._held.items()}
        if done[member] - min(done.values()) > self.most:
            self.world.fault(f"{member} begins {done[member] - min(done.values())} batches ahead of the slowest")

    def _total(self, member, held):
        """Where it began, which is the master's word, and what it has done since."""
        return self._base.setdefault(member, held.before) + sum(self._done.get(member, {}).values())


class Bounded(World):
    """A world under bounded staleness in which nobody dies, so that who has done what is known for certain."""

    def __init__(self, most, seed):
        self.watched = Watched(most)
        plan = replace(asynchronous(max_staleness=most), samples=40, batch_size=1, epochs=1)
        super().__init__(plan, seed, 2, CALM_BUT_LATE, Roles(trainer=self.watched.trainer))
        self.watched.world = self


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_trainer_begins_a_batch_more_batches_ahead_than_allowed(seed, most):
    begun = sum(check(Bounded(most, one)).watched.begun for one in seeds(seed))
    assert begun > 20 * SCHEDULES


@pytest.mark.parametrize("most", [0, 2])
def test_nobody_waits_for_ever_for_trainers_that_die_freeze_leave_and_join(seed, most):
    for one in seeds(seed):
        check(World(asynchronous(max_staleness=most, push_every=2, backup_after_s=1.5), one, 2))


def breaks_pace(monkeypatch, name, method):
    monkeypatch.setattr(Pace, name, method)
    return first_fault(lambda seed: Bounded(1, seed))


def test_trainers_that_never_wait_are_found(monkeypatch):
    may_begin = Pace.may_begin
    assert "ahead of the slowest" in breaks_pace(
        monkeypatch, "may_begin", lambda self, member, batches: may_begin(self, member, batches) or True
    )


def test_a_bound_that_is_one_too_large_is_found(monkeypatch):
    init = Pace.__init__
    assert "2 batches ahead" in breaks_pace(monkeypatch, "__init__", lambda self, most: init(self, most + 1))


def test_a_slow_trainer_that_counts_as_fast_with_each_new_task_is_found(monkeypatch):
    def release(self, member):
        if self._held.pop(member, None) is not None:
            self._raise()

    assert "ahead of the slowest" in breaks_pace(monkeypatch, "release", release)


def test_waiting_for_those_who_are_gone_is_found(monkeypatch):
    monkeypatch.setattr(Pace, "release", lambda self, member: None)
    assert "does not end" in first_fault(lambda seed: World(asynchronous(max_staleness=0), seed, 1, ROUGH))


# -- late batches ------------------------------------------------------------------------------------------------------


class Reader:
    """Answers pulls from a model, as a trainer's."""

    def __init__(self, model):
        self._model = model

    def pull(self, generation, version, wanted, groups, evaluating):
        rows = [self._model.rows(table, keys, evaluating) for table, keys in wanted]
        return PulledModel(version, rows, [self._model.span(group) for group in groups])
        yield


def replayed(world):
    """The model that the committed steps make one after the other, with no job and no messages."""
    plan, model = world.plan, Model(world.plan.schema, 0, 1)
    model.set_dense(GroupGrads(s.group, s.lr, s.values, s.present) for s in initial_values(plan.schema))
    script = Script(plan, Reader(model), lambda: iter(()), None, None, None)
    for (place, step), chosen in sorted(world._commits.items()):
        if place or step < 0:
            continue
        contributions = []
        for _, attempt in chosen:
            epoch, ids = world._samples[attempt]
            flow = script._gradients(SimpleNamespace(generation=Generation(1), epoch=epoch), step, ids)
            rows, spans = run(flow)
            tables = [TableGrads(r.table, r.lr, r.keys, r.grads) for r in rows]
            groups = [GroupGrads(s.group, s.lr, s.values, s.present) for s in spans]
            contributions.append(Contribution(ids.size, tables, groups))
        if contributions:
            model.update(contributions)
    tables = {(t, part): model.export(t, part, 0, 1 << 30)[0].tobytes() for t in (USERS, COUNTS) for part in PARTS}
    return tables | {group: model.span(group).tobytes() for group in range(5)}


def run(flow):
    while True:
        try:
            next(flow)
        except StopIteration as stop:
            return stop.value


class Incomplete(World):
    """A world whose steps may do without some tasks: judged by what was committed. `left_out`: samples by that."""

    def _judge_sync(self):
        places = range(len(self.pservers))
        steps = sorted(step for place, step in self._commits if place == 0)
        if steps != list(range(-1, len(steps) - 1)) or len(self._commits) != len(places) * len(steps):
            self.fault("the pservers did not apply the same steps, one after the other")
        chosen = [self._commits[0, step] for step in steps]
        if any(chosen != [self._commits.get((place, step)) for step in steps] for place in places):
            self.fault("a step was applied differently on two pservers")
        of_steps = (self._samples[attempt] for step in chosen[1:] for _, attempt in step)
        seen = Counter((epoch, sample) for epoch, ids in of_steps for sample in ids.tolist())
        self.left_out = self.plan.samples * self.plan.epochs - len(seen)
        status = self.master.status(Request(0), self.now_s)
        counted = status.dropped + sum(task.samples for task in status.set_aside)
        if max(seen.values()) > 1:
            self.fault("a sample counted twice")
        if self.left_out != counted or status.samples != len(seen):
            self.fault(f"{self.left_out} samples are missing, {counted} are said to be")
        if self.final() != replayed(self):
            self.fault("the model is not what the committed steps make")


DROPPING = Plan(UpdateSpec(UpdateName.SYNC, 3, drop_after_s=0.4))


@pytest.mark.parametrize("pservers", [1, 3])
def test_steps_without_late_tasks_are_whole_on_all_pservers_and_what_is_missing_is_counted(seed, pservers):
    worlds = [check(Incomplete(DROPPING, one, pservers)) for one in seeds(seed)]
    assert any(world.left_out for world in worlds)
    assert all(len(chosen) for world in worlds for (_, step), chosen in world._commits.items())


def test_backups_come_before_tasks_are_dropped(seed):
    plan = replace(DROPPING, update=UpdateSpec(UpdateName.SYNC, 3, backup_after_s=0.3, drop_after_s=1.0))
    for one in seeds(seed):
        check(Incomplete(plan, one, 2))


def test_with_a_long_patience_nothing_is_dropped_and_the_bits_are_those_of_a_run_without(seed):
    for one in seeds(seed):
        check(World(replace(DROPPING, update=UpdateSpec(UpdateName.SYNC, 3, drop_after_s=500.0)), one, 2))


class DropsOnOnePserver(Pserver):
    """Applies a step as it would be with all that is staged."""

    def _apply(self, model, commit, pushes):
        late = [push for key, push in self._staged.items() if key not in commit.chosen and push.step >= 0]
        tasks = {push.task for push in pushes}
        pushes = pushes + [push for push in late if push.task not in tasks][:1]
        super()._apply(model, commit, sorted(pushes, key=lambda push: push.task))


def test_a_pserver_that_takes_late_pushes_after_all_is_found():
    roles = Roles(pserver=DropsOnOnePserver)
    assert first_fault(lambda seed: Incomplete(DROPPING, seed, 2, ROUGH, roles))


# -- scripts that raise ------------------------------------------------------------------------------------------------


class Raising(Incomplete):
    """A world in whose tasks scripts raise; processes that end by that are started again."""

    def fault(self, text):
        if "until they were set aside" not in text:
            super().fault(text)

    def _judge(self):
        failure, self.master.failure = self.master.failure, None
        if failure is None or "until they were set aside" not in failure:
            World.fault(self, f"the job ended with {failure}, and not with what was set aside")
        super()._judge()

    def _judge_async(self):
        keys = np.frombuffer(self.final()[COUNTS, ExportPart.KEYS], np.int64)
        counts = np.frombuffer(self.final()[COUNTS, ExportPart.VALUES], np.float32)
        status = self.master.status(Request(0), self.now_s)
        missing = self.plan.samples * self.plan.epochs - keys.size
        counted = sum(task.samples for task in status.set_aside)
        if set(counts.tolist()) != {1.0} or missing != counted:
            World.fault(self, f"{missing} samples are missing, {counted} are said to be; counts {set(counts.tolist())}")
        bad = {key for e in range(self.plan.epochs) for key in count_key(e, np.array(sorted(self.plan.raises_at)))}
        if bad & set(keys.tolist()):
            World.fault(self, "a batch in which the script raises was applied")


@pytest.mark.parametrize(
    "rule", [UpdateSpec(UpdateName.SYNC, 3), UpdateSpec(UpdateName.ASYNC, 3)], ids=lambda u: u.name
)
def test_a_task_in_which_the_script_raises_is_set_aside_and_all_else_counts_once(seed, rule):
    for one in seeds(seed):
        world = check(Raising(Plan(rule, raises_at=frozenset({7})), one, 2))
        assert len(world.master.status(Request(0), 0.0).set_aside) == 2


def test_of_an_asynchronous_task_in_groups_the_groups_before_are_applied(seed):
    for one in seeds(seed):
        check(Raising(replace(asynchronous(push_every=2), raises_at=frozenset({7})), one, 2))


# -- epochs left early -------------------------------------------------------------------------------------------------


class Left(World):
    """A world whose scripts leave an asynchronous epoch early: each of its batches is applied once at most."""

    def _judge_async(self):
        final, whole = self.final(), [e for e in range(self.plan.epochs) if e != self.plan.break_at[0]]
        of_epoch = self.plan.batches() // self.plan.epochs
        applied = np.frombuffer(final[APPLIED], np.float32) - initial_values(self.plan.schema)[APPLIED].values
        if not all(len(whole) * of_epoch <= n <= self.plan.batches() for n in applied.tolist()):
            self.fault(f"the elements of the dense parameters had {applied.tolist()} batches")
        keys = np.frombuffer(final[COUNTS, ExportPart.KEYS], np.int64).tolist()
        counts = np.frombuffer(final[COUNTS, ExportPart.VALUES], np.float32).tolist()
        expected = {key for e in whole for key in count_key(e, np.arange(self.plan.samples)).tolist()}
        if set(counts) - {1.0} or not expected <= set(keys):
            self.fault("a sample was trained twice, or one of a whole epoch not at all")


def leaving(epochs=2, **options):
    """Scripts leave the last epoch."""
    return replace(asynchronous(**options), epochs=epochs, break_at=(epochs - 1, epochs - 1))


FREEZING = Trouble(slow=0.1, mean_s={"freeze": 0.3, "join": 2.0})
"""In which those who come back push for an epoch that is over while the model is being saved."""


@pytest.mark.parametrize("options", [{}, {"push_every": 2}, {"max_staleness": 0}], ids=str)
def test_nothing_is_applied_after_the_end_of_an_epoch_that_was_left(seed, options):
    for one in seeds(seed):
        check(Left(leaving(**options), one, 2))
        check(Left(leaving(1, **options), one, 2, FREEZING))


class IgnoresTheEndOfEpochs(Pserver):
    def _begin_epoch(self, epoch):
        pass


def test_a_pserver_that_takes_batches_of_an_epoch_that_is_over_is_found():
    roles = Roles(pserver=IgnoresTheEndOfEpochs)
    assert first_fault(lambda seed: Left(leaving(1), seed, 2, FREEZING, roles))
