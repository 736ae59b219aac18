"""How an asynchronous epoch ends that a script has left: no checkpoint shows it before its batches are settled."""

from test_master_recovery import ASYNC, Job, progress_of, trained

from evergrad.messages import AskCheckpoint, BreakDone, CloseEpoch, Exited, Member, Request, StopJob, WantEpoch


def left_while_another_is_in_a_task():
    job = Job(schema=ASYNC)
    job.join("a", "b")
    job.batch("a")
    task = job.batch("b")
    job.ask("a", WantEpoch(0, 2), BreakDone(0, 0, None, task.generation))
    return job, task


def test_no_cut_begins_before_the_last_task_is_done_and_all_pservers_have_closed_the_epoch():
    job, task = left_while_another_is_in_a_task()
    job.say("a", AskCheckpoint(job.request(), Member("a")))
    job.wait(1, "a", "b")
    assert all(set(p.cuts) <= {0} and p.frozen is None for p in job.pservers.values())
    job.pservers[1].is_deaf = lambda message: isinstance(message, CloseEpoch)
    job.ask("b", WantEpoch(0, 2), trained(task))
    job.wait(1, "a", "b")
    assert all(set(p.cuts) <= {0} for p in job.pservers.values())
    job.pservers[1].is_deaf = lambda message: False
    job.wait(1, "a", "b")
    assert [(p.epoch, p.is_closed) for p in progress_of(job)] == [(-1, False), (0, True)]
    assert not job.status().checkpoints.failed


def test_so_it_is_in_a_job_that_is_to_stop():
    job, _ = left_while_another_is_in_a_task()
    job.say("launcher", StopJob(Request(5), None, grace_s=60.0))
    job.wait(1, "a", "b")
    assert all(set(p.cuts) <= {0} for p in job.pservers.values())
    job.say("launcher", Exited(Request(6), "b", 7))
    job.wait(1, "a")
    assert job.master.has_ended
    assert progress_of(job)[-1].is_closed


def test_the_next_master_tells_the_pservers_that_an_epoch_was_left_before_it_counts_as_over():
    job, _ = left_while_another_is_in_a_task()
    for p in job.pservers.values():
        p.is_deaf = lambda message: isinstance(message, CloseEpoch)
    job.start_master()
    job.wait(1)
    assert all(set(p.cuts) <= {0} for p in job.pservers.values())
    for p in job.pservers.values():
        p.is_deaf = lambda message: False
    job.wait(1)
    assert [(p.epoch, p.is_closed) for p in progress_of(job)] == [(-1, False), (0, True)]
