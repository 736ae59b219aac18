"""One epoch under each rule: its tasks, its steps, its end."""

import pytest

from evergrad.master.dispatch import AttemptNumbers
from evergrad.master.training import AsyncEpoch, Now, Patience, SyncEpoch, Training
from evergrad.messages import (
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

A, B, C, D = (Member(name) for name in "abcd")
NEVER = Patience(None, 1)


def now(time_s=0.0):
    return Now(time_s, Request(9), Term(1), Generation(1))


def sync_epoch(samples=10, streams=2, batch_size=2, version=5, patience=NEVER):
    data = DataSpec(samples, "data", batch_size)
    return SyncEpoch(3, data, streams, version, AttemptNumbers(Term(1)), patience)


def round_epoch(samples=22, streams=2, batch_size=2, steps=3, version=5, first=40):
    data = DataSpec(samples, "data", batch_size)
    return SyncEpoch(3, data, streams, version, AttemptNumbers(Term(1)), NEVER, steps, first)


def async_epoch(samples=10, batches=2, batch_size=2, first=0, patience=NEVER, max_staleness=None):
    data = DataSpec(samples, "data", batch_size)
    return AsyncEpoch(3, data, batches, first, AttemptNumbers(Term(1)), patience, max_staleness)


def done(task, contributed=True):
    return TrainDone(Generation(1), task.attempt, contributed, {})


def take(epoch, *members, time_s=0.0):
    tasks = [epoch.hand_out(member, now(time_s)) for member in members]
    assert None not in tasks
    return tasks


def do_step(epoch, *members):
    for task in take(epoch, *members):
        epoch.finish(done(task), 0.0)
    return epoch.commit()


def test_a_sync_task_says_all_that_a_trainer_needs():
    task, other = take(sync_epoch(), A, B)
    assert (task.request, task.term, task.generation) == (9, 1, 1)
    assert (task.epoch, task.step, task.index, task.start, task.stop) == (3, 5, 0, 0, 2)
    assert (other.step, other.index, other.start, other.stop) == (5, 1, 5, 7)


def test_no_task_of_the_next_step_is_handed_out_before_the_commit():
    epoch = sync_epoch()
    first, second = take(epoch, A, B)
    epoch.finish(done(first), 0.0)
    assert epoch.commit() is None
    assert epoch.hand_out(A, now()) is None
    epoch.finish(done(second), 0.0)
    assert epoch.hand_out(A, now()) is None
    assert epoch.commit() == [(0, first.attempt), (1, second.attempt)]
    assert take(epoch, A)[0].step == 6


def test_a_commit_names_tasks_in_order_whatever_the_order_they_were_done_in():
    epoch = sync_epoch(streams=3, samples=30)
    tasks = take(epoch, A, B, C)
    for task in reversed(tasks):
        epoch.finish(done(task), 0.0)
    assert epoch.commit() == [(t.index, t.attempt) for t in tasks]


def test_a_commit_names_the_attempt_that_was_reported_first():
    epoch = sync_epoch(samples=2, streams=1)
    (first,) = take(epoch, A)
    epoch.release(A)
    (second,) = take(epoch, B)
    assert epoch.finish(done(second), 0.0) == 2
    assert epoch.finish(done(first), 0.0) == 0
    assert epoch.commit() == [(0, second.attempt)]


def test_a_task_that_contributes_nothing_is_done_and_not_in_the_commit():
    epoch = sync_epoch()
    first, second = take(epoch, A, B)
    assert epoch.finish(done(first, contributed=False), 0.0) == 2
    epoch.finish(done(second), 0.0)
    assert epoch.commit() == [(1, second.attempt)]


def test_a_step_to_which_no_task_contributes_is_committed_with_none():
    epoch = sync_epoch()
    for task in take(epoch, A, B):
        epoch.finish(done(task, contributed=False), 0.0)
    assert epoch.commit() == []


def test_a_trainer_gets_the_next_batch_of_the_stream_it_had():
    epoch = sync_epoch()
    do_step(epoch, A, B)
    assert [t.index for t in take(epoch, B, A)] == [1, 0]


def test_the_tasks_of_a_dead_trainer_go_to_others():
    epoch = sync_epoch()
    take(epoch, A, B)
    assert epoch.hand_out(C, now()) is None
    epoch.release(A)
    assert take(epoch, C)[0].index == 0


def test_more_trainers_than_tasks_get_none():
    epoch = sync_epoch()
    take(epoch, A, B)
    assert epoch.hand_out(C, now()) is None
    assert epoch.waits_for() == {0: (A, 0.0), 1: (B, 0.0)}


def test_every_sample_of_an_epoch_is_in_exactly_one_task():
    for samples in (1, 2, 7, 10, 11):
        epoch = sync_epoch(samples=samples, streams=3)
        seen = []
        while not epoch.is_closed:
            while (task := epoch.hand_out(A, now())) is not None:
                seen += range(task.start, task.stop)
                epoch.finish(done(task), 0.0)
            epoch.commit()
        assert sorted(seen) == list(range(samples))
        assert epoch.step == epoch.steps


def test_the_last_step_has_only_the_tasks_that_have_samples():
    epoch = sync_epoch(samples=3, streams=2, batch_size=1)
    do_step(epoch, A, B)
    (task,) = take(epoch, A)
    assert epoch.hand_out(B, now()) is None
    epoch.finish(done(task), 0.0)
    assert epoch.commit() == [(1, task.attempt)]
    assert epoch.is_closed


def test_an_epoch_without_samples_is_over_at_once():
    assert sync_epoch(samples=0).is_closed
    assert async_epoch(samples=0).is_closed


@pytest.mark.parametrize("make", [sync_epoch, async_epoch])
def test_a_closed_epoch_hands_out_nothing_and_counts_nothing(make):
    epoch = make()
    first, second = take(epoch, A, B)
    epoch.close()
    assert epoch.is_closed
    assert epoch.hand_out(C, now()) is None
    assert epoch.finish(done(first), 0.0) == epoch.finish(done(second), 0.0) == 0
    assert epoch.commit() is None


def test_an_async_task_says_all_that_a_trainer_needs():
    epoch = async_epoch(samples=10, batches=2, batch_size=2, first=40)
    tasks = take(epoch, A, B, C)
    assert [(t.epoch, t.task, t.start, t.stop, t.first) for t in tasks] == [
        (3, 0, 0, 4, 40), (3, 2, 8, 10, 44), (3, 1, 4, 8, 42),
    ]  # fmt: skip
    assert [t.following for t in tasks] == [tasks[2].batches, None, None]


def test_an_async_trainer_gets_the_task_that_was_to_follow_if_nobody_else_had_nothing_to_do():
    epoch = async_epoch(samples=20, batches=1, batch_size=2)
    (first,) = take(epoch, A)
    others = take(epoch, B, C)
    assert first.following.task == 1
    assert [t.task for t in others] == [2, 4]
    epoch.finish(done(first), 0.0)
    epoch.release(A)
    (second,) = take(epoch, A)
    assert (second.task, second.following.task) == (1, 6)


def test_under_bounded_staleness_no_task_is_named_before_it_is_given():
    assert take(async_epoch(samples=20, max_staleness=2), A)[0].following is None


def test_an_async_epoch_is_over_when_all_its_tasks_are_done():
    epoch = async_epoch()
    tasks = take(epoch, A, B, C)
    counted = [epoch.finish(done(task), 0.0) for task in tasks]
    assert counted == [4, 2, 4]
    assert epoch.is_closed
    assert epoch.step == epoch.steps == 3


def test_an_async_epoch_has_nothing_to_commit():
    epoch = async_epoch(samples=2)
    (task,) = take(epoch, A)
    epoch.finish(done(task), 0.0)
    assert epoch.commit() is None


def test_a_task_of_unknown_attempt_counts_nothing():
    for epoch in (sync_epoch(), async_epoch()):
        take(epoch, A)
        assert epoch.finish(TrainDone(Generation(1), Attempt(7, 1), True, {}), 0.0) == 0


def test_no_task_is_handed_out_twice_before_ten_steps_are_measured():
    patience = Patience(None, 2)
    for _ in range(19):
        patience.measure(0.1)
    assert patience.backup_after_s() is None
    patience.measure(0.1)
    assert patience.backup_after_s() is not None


def test_a_task_is_late_after_eight_times_the_average_and_at_least_a_second():
    patience = Patience(None, 1)
    for _ in range(10):
        patience.measure(0.5)
    assert patience.backup_after_s() == pytest.approx(4.0)
    quick = Patience(None, 1)
    for _ in range(10):
        quick.measure(0.001)
    assert quick.backup_after_s() == 1.0


def test_the_average_follows_what_is_measured():
    patience = Patience(None, 1)
    for _ in range(10):
        patience.measure(1.0)
    for _ in range(100):
        patience.measure(3.0)
    assert patience.backup_after_s() == pytest.approx(24.0, rel=0.01)


def test_a_patience_the_user_gave_holds_from_the_start():
    assert Patience(0.25, 1).backup_after_s() == 0.25


def test_a_late_task_goes_to_a_spare_trainer_too_and_either_may_be_first():
    for first_wins in (True, False):
        epoch = sync_epoch(streams=1, patience=Patience(2.0, 1))
        (slow,) = take(epoch, A, time_s=0.0)
        assert epoch.hand_out(B, now(1.9)) is None
        (backup,) = take(epoch, B, time_s=2.1)
        assert (backup.index, backup.start, backup.stop) == (slow.index, slow.start, slow.stop)
        winner = slow if first_wins else backup
        epoch.finish(done(winner), 3.0)
        assert epoch.commit() == [(0, winner.attempt)]


def test_a_task_of_a_round_is_the_next_batches_of_its_stream_and_says_the_number_of_its_first():
    epoch, seen = round_epoch(), []
    while not epoch.is_closed:
        tasks = take(epoch, A, B)
        seen.append([(t.step, t.index, t.start, t.stop, t.first) for t in tasks])
        for task in tasks:
            assert epoch.finish(done(task), 0.0) == task.stop - task.start
        epoch.commit()
    assert seen == [
        [(5, 0, 0, 6, 40), (5, 1, 11, 17, 40)], [(6, 0, 6, 11, 43), (6, 1, 17, 22, 43)],
    ]  # fmt: skip
    assert epoch.steps == 2
    assert epoch.batches == 6, "of 11 samples: five of two and one of one"


def test_batches_of_rounds_are_counted_over_epochs_also_of_those_left_early():
    training = Training(UpdateSpec(UpdateName.LOCAL_SGD, 2, local_steps=3), AttemptNumbers(Term(1)))
    data, firsts = DataSpec(22, "data", 2), []
    for number, rounds in enumerate((2, 1, 0, 2)):
        epoch = training.open(number, data)
        for _ in range(rounds):
            firsts.append([task.first for task in take(epoch, A, B)])
            epoch.release(A)
            epoch.release(B)
            do_step(epoch, A, B)
            training.version += 1
        epoch.close()
    assert firsts == [[0, 0], [3, 3], [6, 6], [9, 9], [12, 12]]


def test_in_sync_the_number_of_a_tasks_batch_is_that_of_its_step():
    training = Training(UpdateSpec(UpdateName.SYNC, 2), AttemptNumbers(Term(1)))
    for number in range(2):
        epoch = training.open(number, DataSpec(5, "data", 1))
        while not epoch.is_closed:
            task = epoch.hand_out(A, now())
            assert task.first == task.step
            while task is not None:
                epoch.finish(done(task), 0.0)
                task = epoch.hand_out(A, now())
            epoch.commit()
            training.version += 1


def test_a_round_has_as_many_tasks_to_measure_as_a_step_before_one_is_late():
    """Ten rounds' worth of tasks."""
    training = Training(UpdateSpec(UpdateName.LOCAL_SGD, 2, local_steps=3), AttemptNumbers(Term(1)))
    epoch, time_s = training.open(0, DataSpec(10_000, "data", 1)), 0.0
    for _ in range(10):
        assert take(epoch, A, B, time_s=time_s)
        assert epoch.hand_out(C, now(time_s + 1000)) is None
        for member in (A, B):
            epoch.release(member)
            epoch.finish(done(epoch.hand_out(member, now(time_s))), time_s + 0.5)
        epoch.commit()
        time_s += 1.0
    take(epoch, A, B, time_s=time_s)
    assert epoch.hand_out(C, now(time_s + 3.9)) is None
    assert epoch.hand_out(C, now(time_s + 4.1)) is not None


def test_a_new_epoch_starts_at_the_version_that_is_there():
    training = Training(UpdateSpec(UpdateName.SYNC, 2), AttemptNumbers(Term(1)))
    training.version = 7
    epoch = training.open(2, DataSpec(4, "data", 1))
    assert epoch.hand_out(A, now()).step == 7
    assert training.number == 2


def test_async_batches_are_counted_over_all_epochs():
    training = Training(UpdateSpec(UpdateName.ASYNC, 2), AttemptNumbers(Term(1)))
    training.open(0, DataSpec(5, "data", 2))
    assert training.open(1, DataSpec(5, "data", 2)).hand_out(A, now()).first == 3


def test_training_is_idle_before_and_between_epochs_and_once_nobody_is_at_a_task_of_one_left_early():
    training = Training(UpdateSpec(UpdateName.SYNC, 1), AttemptNumbers(Term(1)))
    assert training.is_idle
    assert training.number == -1
    epoch = training.open(0, DataSpec(4, "data", 1))
    assert not training.is_idle
    take(epoch, A)
    epoch.close()
    assert not training.is_idle
    epoch.release(A)
    assert training.is_idle
