"""Exceptions in tasks: what is set aside, and when the job has failed."""

import pytest

from evergrad.master import failures
from evergrad.master.failures import Failures
from evergrad.master.training import Failed
from evergrad.messages import SetAside


def failed(task, times=1, samples=10):
    return Failed(task, f"epoch 0, task {task}", times, samples)


def until_set_aside(counted, task, most=3):
    """The script raises in a task until it is set aside; returns why the job has failed, if it has."""
    return [counted.note(failed(task, times), f"E{task}") for times in range(1, most + 1)][-1]


def test_a_task_is_set_aside_when_the_script_has_raised_in_it_three_times():
    counted = Failures()
    counted.done()
    assert [counted.is_last(failed(1, times)) for times in (1, 2, 3)] == [False, False, True]
    assert until_set_aside(counted, 1) is None
    assert counted.set_aside == [SetAside("epoch 0, task 1", 10, "E1")]
    assert counted.summary().startswith(
        "the script raised in 1 task until they were set aside, and 10 samples were left"
    )


@pytest.mark.parametrize("most", [1, 2, 5])
def test_how_often_is_what_the_user_says(most):
    counted = Failures(most)
    counted.done()
    assert [counted.is_last(failed(1, times)) for times in (most - 1, most)] == [False, True]


def test_without_any_the_job_has_succeeded():
    counted = Failures()
    counted.done()
    counted.note(failed(1), "E")
    assert counted.summary() is None


def test_a_script_that_raises_in_two_tasks_before_any_was_done_fails_the_job():
    counted = Failures()
    assert [counted.note(failed(0, times), "E") for times in (1, 2)] == [None] * 2
    assert counted.note(failed(1), "E") == "the script has raised in two tasks, and none was ever done"


def test_the_very_first_task_may_be_the_one_that_is_set_aside():
    counted = Failures()
    assert until_set_aside(counted, 0) is None
    counted.done()
    assert until_set_aside(counted, 1) is None
    assert [s.task for s in counted.set_aside] == ["epoch 0, task 0", "epoch 0, task 1"]
    assert "in 2 tasks" in counted.summary()
    assert "20 samples" in counted.summary()


def test_three_tasks_set_aside_with_none_done_in_between_fail_the_job():
    counted = Failures()
    counted.done()
    assert until_set_aside(counted, 0) is until_set_aside(counted, 1) is None
    assert until_set_aside(counted, 2) == "3 tasks were set aside, and none was done in between"


def test_a_task_done_in_between_begins_the_count_anew():
    counted = Failures()
    for task in range(8):
        counted.done()
        assert until_set_aside(counted, task) is None
    assert len(counted.set_aside) == 8


def test_there_is_an_end_to_setting_aside(monkeypatch):
    monkeypatch.setattr(failures, "MOST_SET_ASIDE", 4)
    counted = Failures(1)
    for task in range(4):
        counted.done()
        assert until_set_aside(counted, task, 1) is None
    counted.done()
    assert until_set_aside(counted, 4, 1) == "more than 4 tasks were set aside"


def test_what_follows_is_said_with_the_count():
    counted = Failures()
    assert counted.words(failed(0, 2)) == "2 of 3"
    assert counted.words(failed(0, 3, 1024)) == "3 of 3, so it is set aside with 1,024 samples"
