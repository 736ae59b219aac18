"""The simulation can fail: with one rule of the protocol switched off it finds a broken promise."""

from dataclasses import replace

import msgspec
import pytest

from evergrad.job.local import LocalModel
from evergrad.master import pservers as master_pservers
from evergrad.master.dispatch import TaskPool
from evergrad.master.master import Master
from evergrad.messages import NEWEST, UpdateName, UpdateSpec
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.trainer import Trainer

from .script import Plan
from .world import Roles, Trouble, World

SYNC = Plan(UpdateSpec(UpdateName.SYNC, 3))
ASYNC = Plan(UpdateSpec(UpdateName.ASYNC, 3))
LOCAL = Plan(UpdateSpec(UpdateName.LOCAL_SGD, 2, local_steps=3))
IMPATIENT = Plan(UpdateSpec(UpdateName.SYNC, 3, backup_after_s=0.3))
ROUGH = Trouble(loss=0.1, duplicate=0.2, slow=0.15, mean_s={"crash": 2.0, "freeze": 2.0, "join": 2.0})
SCHEDULES = 30


def first_fault(plan: Plan, roles: Roles) -> str:
    """What the simulation finds first, in at most `SCHEDULES` schedules."""
    for seed in range(SCHEDULES):
        world = World(plan, seed, pservers=2, trouble=ROUGH, roles=roles).run()
        if world.faults:
            return world.faults[0]
    pytest.fail(f"{SCHEDULES} schedules found nothing wrong")


class CommitsAtAnyVersion(Pserver):
    def _commit(self, src, message):
        self._version = message.step
        return super()._commit(src, message)


class ForgetsWhichCommitWasLast(Pserver):
    def _commit(self, src, message):
        if message.step < self._version:
            message = msgspec.structs.replace(message, step=self._version, chosen=())
        return super()._commit(src, message)


class StagesByTaskAlone(Pserver):
    def _push(self, push, model, admission):
        answer = super()._push(push, model, admission)
        newest = (push.task, push.attempt)
        self._staged = {key: p for key, p in self._staged.items() if key == newest or key[0] != push.task}
        return answer


class PullsWhateverThereIs(Pserver):
    def _pull(self, src, pull, model, admission):
        return super()._pull(src, msgspec.structs.replace(pull, version=NEWEST), model, admission)


class LeavesOutMissingPushes(Pserver):
    def _commit(self, src, message):
        held = tuple(key for key in message.chosen if key in self._staged)
        return super()._commit(src, msgspec.structs.replace(message, chosen=held[:1]))


class AppliesEveryResending(Pserver):
    def _push_batch(self, src, push, model, admission):
        self._progress[push.task] = push.batch
        return super()._push_batch(src, push, model, admission)


class KeepsTasksOfTheDead(Master):
    def _release(self, member):
        if member in self.members:
            super()._release(member)


class GoesOnWhereTheFirstPserverIs(Trainer):
    """Starts at the most that a pserver has applied, not at the least."""

    def where(self, task):
        places, self._pservers = self._pservers, self._pservers[:1]
        first = yield from super().where(task)
        self._pservers = places
        return first


@pytest.mark.parametrize(
    "pserver",
    [CommitsAtAnyVersion, ForgetsWhichCommitWasLast, PullsWhateverThereIs, LeavesOutMissingPushes],
)
def test_a_pserver_without_one_rule_of_sync_is_found(pserver):
    assert first_fault(SYNC, Roles(pserver=pserver))


def test_a_pserver_that_stages_by_task_alone_is_found():
    assert "lacks a push" in first_fault(IMPATIENT, Roles(pserver=StagesByTaskAlone))


def test_a_pserver_that_applies_a_resent_batch_again_is_found():
    assert first_fault(ASYNC, Roles(pserver=AppliesEveryResending))


@pytest.mark.parametrize("plan", [SYNC, ASYNC])
def test_a_master_that_keeps_the_tasks_of_the_dead_is_found(plan):
    assert "does not end" in first_fault(plan, Roles(master=KeepsTasksOfTheDead))


def test_a_trainer_that_asks_one_pserver_where_a_task_stands_is_found():
    assert first_fault(ASYNC, Roles(trainer=GoesOnWhereTheFirstPserverIs))


def test_trainers_that_keep_the_state_of_their_own_steps_are_found():
    kept = replace(LOCAL, update=msgspec.structs.replace(LOCAL.update, keep_inner_state=True))
    assert "differs from that of the run without faults" in first_fault(kept, Roles())


def test_trainers_that_begin_a_task_with_what_the_last_one_left_are_found(monkeypatch):
    monkeypatch.setattr(LocalModel, "forget", lambda self: None)
    assert first_fault(LOCAL, Roles())


def test_a_task_of_several_batches_whose_rows_are_those_of_another_round_is_found():
    assert first_fault(LOCAL, Roles(pserver=PullsWhateverThereIs))


def test_a_commit_that_is_not_sent_again_is_found(monkeypatch):
    monkeypatch.setattr(master_pservers, "RESEND_S", 1e9)
    assert "does not end" in first_fault(SYNC, Roles())


def test_a_report_that_is_taken_for_another_attempt_is_found(monkeypatch):
    finish = TaskPool.finish

    def finish_any(self, attempt):
        return finish(self, attempt if attempt in self._index_of else next(iter(self._index_of), attempt))

    monkeypatch.setattr(TaskPool, "finish", finish_any)
    assert first_fault(IMPATIENT, Roles())
