"""Scripts that are ahead of the checkpoint to which a job falls back, and what follows for them."""

import msgspec
import pytest
from test_master_recovery import DATA, SPEC, SYNC, Job, progress_of, trained

from evergrad.master.errands import PutManifest
from evergrad.messages import (
    Ask,
    BreakDone,
    CheckpointSpec,
    Commit,
    Ended,
    EpochIs,
    EvalDone,
    EvalTask,
    Generation,
    InitTask,
    Join,
    Member,
    Over,
    Restore,
    Role,
    StartAgain,
    SyncTask,
    TotalsAre,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEnd,
    WantEpoch,
    WantTotals,
)
from evergrad.metrics import partial

ONE_A_STEP = msgspec.structs.replace(SYNC, update=UpdateSpec(UpdateName.SYNC, 1))


class SlowStorage(Job):
    """Manifests are on their way as long as `is_slow`."""

    is_slow = False

    def run_errands(self):
        errands = self.master._recovery._errands
        if self.is_slow:
            errands[:] = [errand for errand in errands if not isinstance(errand, PutManifest)]
        super().run_errands()


def rejoin(job, name, began):
    """A process whose script goes on comes back as another member."""
    job.say(name, Join(job.request(), Role.TRAINER, Member(name), name, 7, began=Generation(began)))
    job.agree(name)
    job.wait(1, name)


def generation_of(job, name):
    return job.say(name, Join(job.request(), Role.TRAINER, Member(name), name, 7)).generation


def test_who_joins_is_told_the_generation_in_which_its_script_begins():
    job = Job()
    assert generation_of(job, "a") == 0
    job.agree("a")
    job.train("a")
    assert generation_of(job, "b") == 1


def left_by_break(job):
    """A script has left epoch 0 at version 3, and the manifest of that is on its way."""
    job.join("a")
    task = job.batch("a")
    for _ in range(3):
        task = job.batch("a", trained(task))
    job.is_slow = True
    answer = job.ask("a", WantEpoch(0, 2), BreakDone(0, 0, None, task.generation))
    assert answer.epoch == 1
    assert job.say("a", Ask(job.request(), Member("a"), WantBatch(1, DATA), None)) is None


@pytest.mark.parametrize("dies", ["trainer's lease", "master"])
def test_a_script_that_was_out_while_the_job_fell_back_behind_it_is_started_again(dies):
    job = SlowStorage(schema=ONE_A_STEP)
    left_by_break(job)
    if dies == "master":
        job.pservers[1].is_alive = False
        job.start_master()
    else:
        job.wait(6)
    job.is_slow = False
    job.start_pserver(1)
    job.wait(4)
    rejoin(job, "a2", began=1)
    assert isinstance(job.batch("a2", epoch=1), StartAgain)
    assert any("behind where scripts are" in note for note in job.status().notes)
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 2)).epoch == 0
    assert isinstance(job.batch("b", epoch=0), SyncTask)


def test_a_whole_epoch_that_was_undone_is_not_skipped():
    job = Job()
    job.join("a")
    job.train("a", 0)
    job.shelf.is_failing = True
    job.train("a", 1)
    job.wait(15, "a")
    assert isinstance(job.answers["a"], Over)
    assert job.batch("a", epoch=2).step == 4
    job.wait(6)
    job.shelf.is_failing = False
    job.start_pserver(1)
    job.wait(4)
    rejoin(job, "a2", began=1)
    assert isinstance(job.batch("a2", epoch=2), StartAgain)
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 3)).epoch == 0
    assert job.batch("b", epoch=1).step == 2


def test_what_such_a_script_has_done_counts_no_more_and_what_it_left_is_open_again():
    job = SlowStorage(schema=ONE_A_STEP)
    job.join("a", "b")
    job.batch("a")
    job.is_slow = True
    job.ask("a", WantEpoch(0, 2), BreakDone(0, 2, None, Generation(1)))
    job.start_pserver(1)
    job.is_slow = False
    job.wait(2, "a", "b")
    assert isinstance(job.ask("b", WantEpoch(0, 2), BreakDone(0, 2, None, Generation(1))), StartAgain)
    job.join("c")
    assert job.ask("c", WantEpoch(-1, 2)) == EpochIs(job.answers["c"].request, 0)
    assert job.batch("c").step == 0


def test_evaluations_beyond_the_checkpoint_are_made_again():
    job = Job()
    job.join("a")
    totals = evaluate(job, "a", -1, 1.0)
    job.train("a", 0)
    job.shelf.is_failing = True
    job.train("a", 1)
    job.wait(15, "a")
    evaluate(job, "a", 1, 2.0)
    job.shelf.is_failing = False
    job.start_pserver(1)
    job.wait(2, "a")
    job.join("b")
    assert job.ask("b", WantTotals(-1, 0, DATA)).totals == totals
    job.train("b", 1)
    assert isinstance(job.ask("b", WantTotals(1, 0, DATA)), EvalTask)


def test_so_are_those_of_an_epoch_into_which_the_job_falls_back():
    job = Job(spec=CheckpointSpec(SPEC.url, every_steps=1, keep=9), schema=ONE_A_STEP)
    job.join("a")
    job.ask("a", WantEpoch(-1, 5))
    job.train("a", 0)
    evaluate(job, "a", 0, 1.0)
    job.train("a", 1, tasks=3)
    job.shelf.is_failing = True
    job.train("a", 1)
    job.wait(15, "a")
    evaluate(job, "a", 1, 2.0)
    job.shelf.is_failing = False
    job.start_pserver(1)
    job.wait(2, "a")
    assert (progress_of(job)[-1].epoch, progress_of(job)[-1].is_closed) == (1, False)
    job.join("b")
    assert isinstance(job.ask("b", WantTotals(0, 0, DATA)), TotalsAre)
    job.train("b", 1)
    assert isinstance(job.ask("b", WantTotals(1, 0, DATA)), EvalTask)


def evaluate(job, name, epoch, value):
    task = job.ask(name, WantTotals(epoch, 0, DATA))
    if isinstance(task, InitTask):
        task = job.ask(name, WantTotals(epoch, 0, DATA), trained(task))
    while isinstance(task, EvalTask):
        task = job.ask(name, WantTotals(epoch, 0, DATA), EvalDone(task.generation, task.attempt, {"n": partial(value)}))
    assert isinstance(task, TotalsAre)
    return task.totals


def test_scripts_that_were_started_again_are_not_so_a_second_time():
    job = Job()
    job.join("a")
    job.train("a", 0)
    job.shelf.is_failing = True
    job.train("a", 1)
    job.wait(15, "a")
    job.shelf.is_failing = False
    job.start_pserver(1)
    job.wait(2, "a")
    job.join("b")
    task = job.batch("b", epoch=1)
    assert task.generation == 2
    job.start_pserver(0)
    job.wait(2, "b")
    assert job.batch("b", epoch=1).generation == 3


def test_scripts_at_their_end_do_not_end_a_job_that_has_fallen_back_behind_them():
    job = SlowStorage(schema=ONE_A_STEP)
    left_by_break(job)
    job.say("a", Ask(job.request(), Member("a"), WantEnd(), None))
    job.start_pserver(1)
    job.is_slow = False
    job.wait(3, "a")
    assert isinstance(job.answers["a"], StartAgain)
    assert not job.master.is_over


def test_a_script_that_leaves_an_epoch_at_a_batch_that_was_undone_is_started_again():
    job = Job(spec=CheckpointSpec(SPEC.url, every_steps=2, keep=9), schema=ONE_A_STEP)
    job.join("a")
    task = job.batch("a")
    for _ in range(2):
        task = job.batch("a", trained(task))
    job.wait(1, "a")
    assert [p.version for p in progress_of(job)] == [0, 2]
    leaving = BreakDone(0, 0, trained(task), task.generation)
    job.start_pserver(1)
    job.wait(2, "a")
    assert isinstance(job.ask("a", WantEpoch(0, 2), leaving), StartAgain)
    job.join("b")
    assert (job.batch("b").epoch, job.answers["b"].step) == (0, 2)


def test_an_epoch_that_is_over_may_be_left_at_a_batch_of_an_older_generation():
    job = Job()
    job.join("a")
    job.train("a")
    job.start_pserver(1)
    job.wait(2, "a")
    assert job.ask("a", WantEpoch(0, 2), BreakDone(0, 0, None, Generation(1))).epoch == 1


def test_a_loop_over_epochs_that_is_left_while_pservers_restore_is_left():
    job = Job()
    job.join("a")
    job.train("a")
    job.pservers[0].is_deaf = lambda message: isinstance(message, Restore)
    job.start_pserver(1)
    job.say("a", Ask(job.request(), Member("a"), WantEnd(), BreakDone(0, 5)))
    job.pservers[0].is_deaf = lambda message: False
    job.wait(3, "a")
    assert isinstance(job.answers["a"], Ended)
    assert progress_of(job)[-1].left_until == 5


def test_a_script_in_mid_epoch_is_not_taken_for_one_with_initial_values_by_the_next_master():
    job = Job()
    job.shelf.is_failing = True
    job.join("a")
    job.batch("a")
    job.wait(15, "a")
    task = job.answers["a"]
    for _ in range(3):
        task = job.batch("a", trained(task))
    job.pservers[1].is_alive = False
    job.start_master()
    job.start_pserver(1)
    job.wait(4)
    rejoin(job, "a2", began=0)
    assert isinstance(job.ask("a2", WantBatch(0, DATA)), StartAgain)
    job.join("b")
    assert isinstance(job.ask("b", WantBatch(0, DATA)), InitTask)


def leaving_at_a_new_master(reaches, left_until=0):
    """A script leaves epoch 0 with a step of an old master's; whether that master's commit reaches the pservers."""
    job = Job(schema=ONE_A_STEP)
    job.join("a")
    task = job.batch("a", trained(job.batch("a")))
    leaving = BreakDone(0, left_until, trained(task), task.generation, task.step + 1)
    for p in job.pservers.values():
        p.is_deaf = (lambda message: False) if reaches else (lambda message: isinstance(message, Commit))
    assert job.ask("a", WantEpoch(0, 2), leaving) is None or reaches
    for p in job.pservers.values():
        p.is_deaf = lambda message: False
    job.start_master()
    job.wait(1)
    rejoin(job, "a2", began=1)
    return job, task, job.ask("a2", WantEpoch(0, 2), leaving)


@pytest.mark.parametrize("left_until", [0, 2])
def test_a_script_that_left_an_epoch_with_a_step_that_was_lost_with_its_master_is_started_again(left_until):
    job, task, answer = leaving_at_a_new_master(False, left_until)
    assert isinstance(answer, StartAgain)
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 2)).epoch == 0
    assert (job.batch("b").epoch, job.answers["b"].step) == (0, task.step)


def test_a_script_that_left_an_epoch_with_a_step_that_the_next_master_found_applied_goes_on():
    job, task, answer = leaving_at_a_new_master(reaches=True)
    assert answer.epoch == 1
    assert job.batch("a2", epoch=1).step == task.step + 1


@pytest.mark.parametrize("others_are_done", [True, False])
def test_a_script_that_leaves_an_epoch_goes_on_though_others_of_its_step_are_not_done(others_are_done):
    job = Job()
    job.join("a", "b")
    task, other = job.batch("a"), job.batch("b")
    last = Ask(job.request(), Member("b"), WantBatch(0, DATA), trained(other))
    if others_are_done:
        job.say("b", last)
    assert job.ask("a", WantEpoch(0, 2), BreakDone(0, 0, trained(task), task.generation, task.step + 1)).epoch == 1
    if not others_are_done:
        job.say("b", last)
    assert job.batch("a", epoch=1).step == others_are_done


def test_a_script_that_leaves_an_epoch_with_a_batch_that_counted_no_more_is_started_again():
    job = Job(schema=ONE_A_STEP)
    job.join("a")
    task = job.batch("a")
    assert isinstance(job.ask("a", WantEpoch(0, 2), BreakDone(0, 0, None, task.generation, 1)), StartAgain)
    assert job.batch("a").step == 0


def test_a_script_that_leaves_an_epoch_at_a_batch_without_a_step_goes_on():
    job = Job(schema=ONE_A_STEP)
    job.join("a")
    task = job.batch("a")
    assert job.ask("a", WantEpoch(0, 2), BreakDone(0, 0, None, task.generation, 0)).epoch == 1


def test_the_checkpoint_that_rides_in_the_last_commit_before_a_break_says_that_the_epoch_was_left():
    job = Job(spec=CheckpointSpec(SPEC.url, every_steps=1, keep=9), schema=ONE_A_STEP)
    job.join("a")
    task = job.batch("a")
    job.ask("a", WantEpoch(0, 2), BreakDone(0, 2, trained(task), task.generation, task.step + 1))
    assert [(p.version, p.is_closed, p.left_until) for p in progress_of(job)] == [(0, False, 0), (1, True, 2)]
