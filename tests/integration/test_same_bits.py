"""The trained model is the same to the bit, however many processes train it and whichever of them are killed."""

import os
import random
import signal
from pathlib import Path

import pytest
from jobs import FILMS, TRAIN, Alone, ByHand, Launched, at_work, digests, is_inside, reached, trainers, until

from evergrad.messages import Status


@pytest.mark.parametrize(("pservers", "size"), [(1, 1), (3, 2), (2, 5)])
def test_a_job_of_processes_saves_the_model_that_one_process_saves(
    tmp_path: Path, alone: Alone, pservers: int, size: int
) -> None:
    model = tmp_path / "model"
    with Launched(tmp_path, TRAIN, "--out", model, pservers=pservers, trainers=size) as job:
        assert job.wait() == 0, job.text
    assert digests(model) == alone(0)


@pytest.mark.parametrize(("size", "pservers"), [(1, 2), (2, 3), (3, 1)])
def test_so_does_one_of_the_films_with_batchnorm_and_dropout(
    tmp_path: Path, alone: Alone, size: int, pservers: int
) -> None:
    model = tmp_path / "model"
    with Launched(tmp_path, FILMS, "--out", model, pservers=pservers, trainers=size) as job:
        assert job.wait() == 0, job.text
    assert digests(model) == alone(0, FILMS)


@pytest.mark.timeout(400)
def test_so_does_one_of_the_films_whose_trainers_are_killed_twenty_times(
    tmp_path: Path, alone: Alone, seed: int
) -> None:
    chance = random.Random(seed)
    args, often = ("--out", tmp_path / "model", "--pause", 0.05), ("--max-restarts", "20")
    with Launched(tmp_path, FILMS, *args, pservers=3, trainers=4, options=often) as job:
        for step in sorted(chance.sample(range(1, 66), 20)):  # of 94
            hit = until_at_work(job, step)
            victim = chance.choice(at_work(hit, hit.epoch))
            os.kill(victim, signal.SIGKILL)
            job.gone(victim)
        assert job.launcher.wait(120.0) == 0, job.text
        assert job.text.count("was killed by SIGKILL; it starts again") == 20
    assert digests(tmp_path / "model") == alone(0, FILMS)


def until_at_work(job: Launched, step: int) -> Status:
    """The job at this step or later, with a trainer that holds a task."""
    return job.until(lambda s: s.version >= step and at_work(s, s.epoch), f"step {step}", within_s=200.0)


@pytest.mark.parametrize("run", range(3))
def test_a_trainer_killed_at_a_random_moment_changes_no_bit(
    tmp_path: Path, alone: Alone, go: Path, seed: int, run: int
) -> None:
    chance = random.Random(seed + run)
    args = ("--out", tmp_path / "model", "--seed", run, "--pause", 0.03, "--hold", f"epoch:1={go}")
    with Launched(tmp_path, TRAIN, *args, pservers=2, trainers=3) as job:
        step = chance.randrange(1, 30)
        hit = job.until(lambda s: is_inside(s, step, epoch=0) and at_work(s) and len(trainers(s)) > 1, f"step {step}")
        victim = chance.choice(at_work(hit))
        os.kill(victim, signal.SIGKILL)
        print(f"killed {victim}, {trainers(hit)[victim].doing}; the job was at step {hit.step} of {hit.steps}")
        after = job.gone(victim)
        assert any("has ended" in note for note in after.notes), after.notes
        go.touch()
        assert job.wait() == 0, job.text
        assert f"(pid {victim}) was killed by SIGKILL; it starts again" in job.text
    assert digests(tmp_path / "model") == alone(run)


def test_a_process_kept_ready_takes_the_place_of_a_killed_trainer_and_changes_no_bit(
    tmp_path: Path, alone: Alone, go: Path
) -> None:
    args = ("--out", tmp_path / "model", "--hold", f"epoch:1={go}")
    with Launched(tmp_path, TRAIN, *args, trainers=2, options=("--standby",)) as job:
        job.until(lambda s: s.epoch == 1 and len(trainers(s)) == 2, "epoch 1 with both")
        (ready,) = until(lambda: [p.pid for p in job.family() if "evergrad.job.standby" in p.cmdline()], "one more")
        victim = min(trainers(job.status()))
        os.kill(victim, signal.SIGKILL)
        job.until(lambda s: ready in trainers(s), "the one kept ready to join")
        go.touch()
        assert job.wait() == 0, job.text
    assert digests(tmp_path / "model") == alone(0)


def test_a_trainer_frozen_past_its_lease_joins_anew_and_changes_no_bit(tmp_path: Path, alone: Alone, go: Path) -> None:
    args = ("--out", tmp_path / "model", "--pause", 0.02, "--hold", f"epoch:1={go}")
    with ByHand(tmp_path, pservers=2, lease_s=2.5) as job:
        first, second = job.trainer("first", TRAIN, *args), job.trainer("second", TRAIN, *args)
        job.until(lambda s: is_inside(s, 5, epoch=0) and second.pid in trainers(s), "step 5 with both")
        second.send(signal.SIGSTOP)
        frozen = job.gone(second.pid)
        assert any("second was silent for" in note for note in frozen.notes)
        job.until(lambda s: s.epoch == 1, "the other to go on alone")
        second.send(signal.SIGCONT)
        job.until(lambda s: second.pid in trainers(s), "the thawed trainer to join anew")
        go.touch()
        assert job.wait(first, second) == [0] * 5
    assert digests(tmp_path / "model") == alone(0)


def test_the_last_trainer_may_die_and_the_job_waits_for_another(tmp_path: Path, alone: Alone, go: Path) -> None:
    args = ("--out", tmp_path / "model", "--pause", 0.01)
    with ByHand(tmp_path, lease_s=2.5) as job:
        only = job.trainer("only", TRAIN, *args, "--hold", f"epoch:1={go}")
        job.until(lambda s: s.epoch == 1 and only.pid in reached(go), "epoch 1")
        only.send(signal.SIGKILL)
        only.wait()
        waiting = job.until(lambda s: s.waiting_for == "a trainer to join", "the job to wait")
        assert not waiting.ended
        other = job.trainer("other", TRAIN, *args)
        assert job.wait(other) == [0] * 3
    assert digests(tmp_path / "model") == alone(0)


def test_trainers_that_come_and_go_during_an_evaluation_and_after_the_last_epoch_change_no_bit(
    tmp_path: Path, alone: Alone
) -> None:
    evaluation, end = tmp_path / "evaluation", tmp_path / "end"
    args = ("--out", tmp_path / "model", "--hold", f"evaluate:0={evaluation}", "--hold", f"end={end}")
    with ByHand(tmp_path, pservers=2, lease_s=2.5) as job:
        first, second, third = (job.trainer(name, TRAIN, *args) for name in ("first", "second", "third"))
        until(lambda: len(reached(evaluation)) == 3, "three trainers to evaluate")
        during = job.trainer("during", TRAIN, *args)
        second.send(signal.SIGKILL)
        until(lambda: during.pid in reached(evaluation), "the joiner to evaluate a part")
        third.send(signal.SIGTERM)
        evaluation.touch()
        assert third.wait() == 143
        until(lambda: {first.pid, during.pid} <= reached(end), "the end of the last epoch")
        after = job.trainer("after", TRAIN, *args)
        until(lambda: after.pid in reached(end), "a trainer that joins after the last epoch to catch up")
        end.touch()
        assert job.wait(first, during, after) == [0] * 6
        totals = {line for trainer in (first, during, after) for line in trainer.text.splitlines() if "totals" in line}
        assert len(totals) == 2, totals
        assert all("'count': 300.0" in line for line in totals)
    assert digests(tmp_path / "model") == alone(0)
