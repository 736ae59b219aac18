"""Steps committed without tasks that are late, and tasks in which the script raises, as an epoch sees them."""

import pytest

from evergrad.master.dispatch import AttemptNumbers
from evergrad.master.training import AsyncEpoch, Now, Patience, SyncEpoch, Training
from evergrad.messages import (
    AsyncTask,
    Attempt,
    DataSpec,
    Generation,
    Member,
    Request,
    Term,
    TrainDone,
    UpdateName,
    UpdateSpec,
)

A, B, C = (Member(name) for name in "abc")


def now(time_s=0.0):
    return Now(time_s, Request(9), Term(1), Generation(1))


def sync_epoch(drop_after_s=2.0, samples=10, streams=2, batch_size=2, backup_after_s=None):
    data, patience = DataSpec(samples, "data", batch_size), Patience(backup_after_s, 1)
    return SyncEpoch(0, data, streams, 5, AttemptNumbers(Term(1)), patience, drop_after_s=drop_after_s)


def async_epoch(samples=10, batches=2, most=None):
    data, patience = DataSpec(samples, "data", 2), Patience(None, 1)
    return AsyncEpoch(0, data, batches, 0, AttemptNumbers(Term(1)), patience, max_staleness=most)


def done(task, contributed=True):
    return TrainDone(Generation(1), task.attempt, contributed, {})


# -- late tasks --------------------------------------------------------------------------------------------------------


def test_a_step_is_committed_without_a_task_that_is_late_once_all_others_have_come():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now(0.0)), epoch.hand_out(B, now(1.0))
    epoch.finish(done(first), 1.5)
    assert epoch.drop_late(3.0) == 0
    assert epoch.commit() is None
    assert epoch.drop_late(3.1) == 2
    assert epoch.commit() == [(0, first.attempt)]
    assert epoch.step == 1


def test_a_step_is_never_committed_before_a_task_has_come():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    assert epoch.drop_late(1e9) == 0
    epoch.finish(done(first), 1e9)
    assert epoch.drop_late(1e9) == 2
    assert epoch.commit() == [(0, first.attempt)]


def test_a_task_that_came_and_contributes_nothing_has_come():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first, contributed=False), 1.0)
    assert epoch.drop_late(2.1) == 2
    assert epoch.commit() == []


def test_too_few_trainers_are_no_reason_to_drop_what_nobody_has_begun():
    epoch = sync_epoch()
    epoch.finish(done(epoch.hand_out(A, now(0.0))), 100.0)
    assert epoch.drop_late(100.0) == 0
    last = epoch.hand_out(A, now(100.0))
    epoch.finish(done(last), 101.0)
    assert len(epoch.commit()) == 2


def test_how_late_a_task_is_counts_from_when_it_was_first_handed_out():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now(0.0)), epoch.hand_out(B, now(0.0))
    epoch.finish(done(first), 1.0)
    epoch.release(B)
    epoch.hand_out(A, now(1.9))
    assert epoch.drop_late(2.1) == 2


def test_a_late_task_that_has_been_given_back_is_dropped_too():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 1.0)
    epoch.release(B)
    assert epoch.drop_late(2.1) == 2


def test_a_backup_that_comes_in_time_saves_the_task():
    epoch = sync_epoch(backup_after_s=1.0)
    first, slow = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 0.5)
    backup = epoch.hand_out(A, now(1.1))
    assert backup.index == slow.index
    epoch.finish(done(backup), 1.9)
    assert epoch.drop_late(9.0) == 0
    assert epoch.commit() == [(0, first.attempt), (1, backup.attempt)]


def test_what_comes_after_it_was_dropped_counts_for_nothing():
    epoch = sync_epoch()
    first, late = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 1.0)
    epoch.drop_late(2.1)
    epoch.commit()
    assert epoch.finish(done(late), 2.2) == 0
    assert epoch.failed(late.attempt, 0) is None
    assert epoch.commit() is None
    tasks = [epoch.hand_out(m, now(2.2)) for m in (A, B)]
    assert [(t.step, t.index, t.start) for t in tasks] == [(6, 0, 2), (6, 1, 7)], "the streams go on"


def test_the_last_step_can_be_committed_without_a_task_too():
    epoch = sync_epoch(samples=4)
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 1.0)
    assert epoch.drop_late(3.0) == 2
    epoch.commit()
    assert epoch.is_closed
    assert epoch.waits_for() == {}
    assert epoch.drop_late(9.0) == 0


def test_a_time_in_which_nobody_could_report_makes_nothing_late():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 1.0)
    epoch.excuse(10.0, 11.0)
    assert epoch.drop_late(11.9) == 0
    assert epoch.drop_late(12.1) == 2


def test_a_task_handed_out_at_the_end_of_that_time_is_late_as_any_other():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 1.0)
    epoch.excuse(10.0, 1.0)
    assert epoch.drop_late(2.9) == 0
    assert epoch.drop_late(3.1) == 2


def test_without_the_option_nothing_is_ever_dropped():
    epoch = sync_epoch(drop_after_s=None)
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(first), 1.0)
    assert epoch.drop_late(1e9) == 0


def test_a_task_set_aside_has_not_come():
    epoch = sync_epoch()
    first, _ = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.set_aside(epoch.failed(first.attempt, 0).task)
    assert epoch.drop_late(9.0) == 0


# -- tasks that fail ---------------------------------------------------------------------------------------------------


def test_a_task_that_failed_is_named_counted_and_handed_out_again():
    epoch = sync_epoch(drop_after_s=None)
    task = epoch.hand_out(A, now())
    failed = epoch.failed(task.attempt, 0)
    assert (failed.where, failed.times, failed.samples) == ("epoch 0, step 0, task 0", 1, 2)
    again = epoch.hand_out(B, now())
    assert again.index != task.index or again.attempt != task.attempt
    assert epoch.failed(Attempt(7, 7), 0) is None


def test_a_step_is_committed_without_a_task_set_aside():
    epoch = sync_epoch(drop_after_s=None)
    bad, good = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    epoch.finish(done(good), 1.0)
    epoch.set_aside(epoch.failed(bad.attempt, 0).task)
    assert epoch.commit() == [(1, good.attempt)]
    assert epoch.hand_out(A, now()).start == 2, "the stream goes on after it"


def test_a_step_all_of_whose_tasks_are_set_aside_is_committed_with_none():
    epoch = sync_epoch(drop_after_s=None)
    for member in (A, B):
        epoch.set_aside(epoch.failed(epoch.hand_out(member, now()).attempt, 0).task)
    assert epoch.commit() == []


@pytest.mark.parametrize(("batches", "left"), [(0, 4), (1, 2), (2, 0), (2**62, 0)])
def test_of_an_asynchronous_task_what_is_not_applied_yet_is_left_out(batches, left):
    epoch = async_epoch()
    failed = epoch.failed(epoch.hand_out(A, now()).attempt, batches)
    assert (failed.where, failed.samples) == ("epoch 0, task 0", left)
    epoch.set_aside(failed.task)
    assert epoch.step == 1


def test_an_asynchronous_epoch_is_over_when_its_last_task_is_set_aside():
    epoch = async_epoch(samples=4)
    epoch.set_aside(epoch.failed(epoch.hand_out(A, now()).attempt, 0).task)
    assert epoch.is_closed


def test_a_failure_after_the_end_of_the_epoch_counts_for_nothing():
    epoch = async_epoch()
    task = epoch.hand_out(A, now())
    epoch.close()
    assert epoch.failed(task.attempt, 0) is None


# -- who may go on -----------------------------------------------------------------------------------------------------


def test_one_whose_attempt_counts_no_more_is_to_give_it_up():
    epoch = async_epoch(most=1)
    one, other = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    assert epoch.may_begin(A, one.attempt, 0)
    assert epoch.may_begin(A, other.attempt, 0) is None
    epoch.finish(done(one), 1.0)
    assert epoch.may_begin(A, one.attempt, 1) is None
    epoch.close()
    assert epoch.may_begin(B, other.attempt, 0) is None


def test_without_bounded_staleness_everyone_may_go_on():
    epoch = async_epoch()
    task = epoch.hand_out(A, now())
    assert epoch.may_begin(A, task.attempt, 99)


def test_a_task_that_ends_lets_others_go_on_at_once():
    epoch = async_epoch(samples=100, batches=5, most=1)
    fast, slow = epoch.hand_out(A, now()), epoch.hand_out(B, now())
    assert [epoch.may_begin(A, fast.attempt, n) for n in range(3)] == [True, True, False]
    epoch.release(B)
    epoch.settle()
    assert epoch.may_begin(A, fast.attempt, 2)
    again = epoch.hand_out(C, now())
    assert again.task == slow.task
    assert [epoch.may_begin(A, fast.attempt, n) for n in (2, 3, 4)] == [True, True, False], "it counts from two on"
    epoch.set_aside(epoch.failed(again.attempt, 0).task)
    epoch.settle()
    assert epoch.may_begin(A, fast.attempt, 4)


# -- the end of an asynchronous epoch ----------------------------------------------------------------------------------


def training(name=UpdateName.ASYNC):
    return Training(UpdateSpec(name, 2), AttemptNumbers(Term(1)))


def test_an_asynchronous_epoch_is_over_once_the_pservers_have_been_told():
    training_ = training()
    epoch = training_.open(3, DataSpec(4, "data", 2))
    task = epoch.hand_out(A, now())
    assert isinstance(task, AsyncTask)
    assert training_.over() is None
    epoch.finish(done(task), 1.0)
    training_.settle()
    assert not training_.is_idle
    assert training_.over() == 3
    assert training_.over() is None, "it is said once"
    assert not training_.is_idle
    training_.settle()
    assert training_.is_idle


def test_one_left_early_is_over_when_nobody_is_at_a_task_any_more():
    training_ = training()
    epoch = training_.open(0, DataSpec(8, "data", 2))
    epoch.hand_out(A, now())
    epoch.close()
    assert training_.over() is None
    epoch.release(A)
    assert training_.over() == 0


def test_a_late_word_of_the_epoch_before_settles_nothing():
    training_ = training()
    for number in range(2):
        epoch = training_.open(number, DataSpec(4, "data", 2))
        training_.settle()
        epoch.finish(done(epoch.hand_out(A, now())), 1.0)
        assert not training_.is_idle
        assert training_.over() == number
        training_.settle()


def test_of_a_synchronous_epoch_nobody_need_be_told():
    training_ = training(UpdateName.SYNC)
    training_.open(0, DataSpec(4, "data", 2)).close()
    assert training_.over() is None
    assert training_.is_idle
