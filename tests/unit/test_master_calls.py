"""What the master remembers of evaluations and savings."""

from test_master_recovery import DATA, Job, trained

from evergrad.master.record import decode
from evergrad.master.script import REMEMBERED_EPOCHS
from evergrad.messages import (
    EvalDone,
    EvalTask,
    EvaluationDone,
    InitTask,
    Over,
    StartAgain,
    SyncTask,
    TotalsAre,
    WantEpoch,
    WantSaved,
    WantTotals,
)
from evergrad.metrics import partial

LAST = REMEMBERED_EPOCHS + 5


class Untouched(dict):
    """Can be asked for a key, and is never gone through."""

    def items(self):
        raise AssertionError("gone through")

    values = keys = __iter__ = items


def test_a_message_costs_the_same_however_many_evaluations_are_done():
    job = Job()
    job.join("a")
    task = job.batch("a")
    script = job.master._script
    script.take_calls([EvaluationDone(epoch, 0, DATA, {}, None) for epoch in range(100)], [])
    job.wait(1, "a")
    script._evaluations, script._savings = Untouched(script._evaluations), Untouched()
    assert isinstance(job.batch("a", trained(task)), SyncTask)
    assert isinstance(job.ask("a", WantTotals(99, 0, DATA)), TotalsAre)


def evaluate(job, epoch):
    task = job.ask("a", WantTotals(epoch, 0, DATA))
    if isinstance(task, InitTask):
        task = job.ask("a", WantTotals(epoch, 0, DATA), trained(task))
    while isinstance(task, EvalTask):
        done = EvalDone(task.generation, task.attempt, {"n": partial(float(epoch))})
        task = job.ask("a", WantTotals(epoch, 0, DATA), done)
    return task.totals


def long_job():
    """A script of two loops that evaluates before, in and between them, and now is in the second."""
    job = Job()
    job.join("a")
    totals = {-1: evaluate(job, -1)}
    for until in (3, LAST + 5):
        for epoch in range(max(job.master._script.training.number + 1, 0), min(until, LAST + 1)):
            job.ask("a", WantEpoch(epoch - 1, until))
            assert isinstance(job.train("a", epoch), Over)
            totals[epoch] = evaluate(job, epoch)
        if until == 3:
            job.ask("a", WantEpoch(2, 3))
            totals[3] = evaluate(job, 3)
    return job, totals


def test_evaluations_of_old_epochs_are_forgotten_but_for_those_by_which_every_script_comes():
    job, totals = long_job()
    known = {e.epoch for e in decode(job.shelf.record).evaluations}
    assert known == {-1, 3, *range(LAST - REMEMBERED_EPOCHS, LAST + 1)}
    job.start_master()
    job.join("b")
    for epoch in (-1, 3, LAST):
        assert job.ask("b", WantTotals(epoch, 0, DATA)).totals == totals[epoch]
    job.train("b", LAST + 1)
    assert job.ask("b", WantTotals(3, 0, DATA)).totals == totals[3]


def test_a_script_that_is_so_far_behind_is_started_again():
    job, _ = long_job()
    job.join("b")
    assert isinstance(job.ask("b", WantTotals(1, 0, DATA)), StartAgain)
    job.join("c")
    assert isinstance(job.ask("c", WantSaved(1, 0, "/model")), StartAgain)
