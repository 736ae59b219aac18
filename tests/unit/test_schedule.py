"""Which samples a task is."""

import pytest

from evergrad import schedule

CASES = [(s, k, b) for s in (0, 1, 2, 3, 7, 16, 33, 100, 1001) for k in (1, 2, 3, 4, 9) for b in (1, 2, 5, 64)]


@pytest.mark.parametrize(("samples", "count", "batch_size"), CASES)
def test_the_sync_tasks_of_an_epoch_cover_every_position_once(samples, count, batch_size):
    steps = schedule.sync_steps(samples, count, batch_size)
    tasks = [schedule.sync_task(samples, count, batch_size, i, k) for i in range(steps) for k in range(count)]
    assert sorted(p for start, stop in tasks for p in range(start, stop)) == list(range(samples))
    assert all(0 <= start <= stop <= samples and stop - start <= batch_size for start, stop in tasks)


@pytest.mark.parametrize(("samples", "count", "batch_size"), CASES)
def test_no_step_is_empty_and_a_step_past_the_end_is(samples, count, batch_size):
    steps = schedule.sync_steps(samples, count, batch_size)
    sizes = []
    for i in range(steps + 1):
        tasks = [schedule.sync_task(samples, count, batch_size, i, k) for k in range(count)]
        sizes.append(sum(stop - start for start, stop in tasks))
    assert all(sizes[:-1])
    assert sizes[-1] == 0


def test_streams_are_consecutive_and_differ_by_at_most_one_sample():
    streams = [schedule.stream(11, 4, k) for k in range(4)]
    assert [list(s) for s in streams] == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]


def test_a_task_of_a_stream_goes_on_where_the_last_one_ended():
    assert [schedule.sync_task(10, 2, 2, i, 1) for i in range(3)] == [(5, 7), (7, 9), (9, 10)]


def test_a_stream_that_has_run_out_yields_an_empty_task():
    assert schedule.sync_steps(5, 2, 1) == 3
    assert [schedule.sync_task(5, 2, 1, 2, k) for k in range(2)] == [(2, 2), (4, 5)]


def test_async_and_evaluation_tasks_cover_every_position_once():
    for samples in (0, 1, 11, 12, 13):
        tasks = [schedule.async_task(samples, 2, 3, t) for t in range(schedule.async_tasks(samples, 2, 3))]
        assert [p for start, stop in tasks for p in range(start, stop)] == list(range(samples))
        assert all(stop > start for start, stop in tasks)
        tasks = [schedule.eval_task(samples, 4, t) for t in range(schedule.eval_tasks(samples, 4))]
        assert [p for start, stop in tasks for p in range(start, stop)] == list(range(samples))
        assert all(stop > start for start, stop in tasks)


def test_the_arithmetic_is_exact_for_samples_beyond_float_precision():
    samples = 2**60 + 7
    assert schedule.stream(samples, 3, 2).stop == samples
    assert schedule.sync_steps(samples, 1, 1) == samples
    assert schedule.async_tasks(samples, 10, 1) == samples // 10 + 1
