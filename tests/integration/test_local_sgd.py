"""Jobs whose trainers take steps of their own end with the bits of one process, whatever happens in mid-task."""

import os
import random
import signal
from pathlib import Path

import pytest
from jobs import TRAIN, ByHand, Launched, at_work, digests, is_inside, python, trainers

ARGS = ("--rule", "local-sgd")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of the model that one process alone makes."""
    folder = tmp_path_factory.mktemp("alone")
    done = python(TRAIN, *ARGS, "--out", folder / "model", cwd=folder)
    assert done.returncode == 0, done.stderr
    return digests(folder / "model")


@pytest.mark.parametrize(("pservers", "size"), [(1, 1), (2, 5)])
def test_a_job_of_processes_saves_the_model_that_one_process_saves(
    tmp_path: Path, alone: dict[str, str], pservers: int, size: int
) -> None:
    model = tmp_path / "model"
    with Launched(tmp_path, TRAIN, *ARGS, "--out", model, pservers=pservers, trainers=size) as job:
        assert job.wait() == 0, job.text
    assert digests(model) == alone


@pytest.mark.parametrize("run", range(3))
def test_a_trainer_killed_in_the_middle_of_its_task_changes_no_bit(
    tmp_path: Path, alone: dict[str, str], go: Path, seed: int, run: int
) -> None:
    """A task takes a tenth of a second and more, so a trainer that holds one is, as good as always, between batches."""
    chance = random.Random(seed + run)
    args = (*ARGS, "--out", tmp_path / "model", "--pause", 0.05, "--hold", f"epoch:1={go}")
    with Launched(tmp_path, TRAIN, *args, pservers=2, trainers=3) as job:
        step = chance.randrange(1, 10)
        hit = job.until(lambda s: is_inside(s, step, epoch=0) and at_work(s) and len(trainers(s)) > 1, f"round {step}")
        victim = chance.choice(at_work(hit))
        os.kill(victim, signal.SIGKILL)
        print(f"killed {victim}, {trainers(hit)[victim].doing}; the job was at round {hit.step} of {hit.steps}")
        after = job.gone(victim)
        assert any("has ended" in note for note in after.notes), after.notes
        go.touch()
        assert job.wait() == 0, job.text
        assert f"(pid {victim}) was killed by SIGKILL; it starts again" in job.text
    assert digests(tmp_path / "model") == alone


def test_one_frozen_in_its_task_and_one_told_to_leave_in_its_task_change_no_bit(
    tmp_path: Path, alone: dict[str, str], go: Path
) -> None:
    """Who is told to leave does so after the batch it is at, and not after the task."""
    args = (*ARGS, "--out", tmp_path / "model", "--pause", 0.05, "--hold", f"epoch:1={go}")
    with ByHand(tmp_path, pservers=2, lease_s=2.5) as job:
        first, second, third = (job.trainer(name, TRAIN, *args) for name in ("first", "second", "third"))
        job.until(lambda s: is_inside(s, 2, epoch=0) and second.pid in at_work(s), "the second in its task")
        second.send(signal.SIGSTOP)
        job.until(lambda s: third.pid in at_work(s), "the third in its task")
        third.send(signal.SIGTERM)
        assert third.wait() == 143
        frozen = job.gone(second.pid)
        assert any("second was silent for" in note for note in frozen.notes)
        job.until(lambda s: s.epoch == 1, "the first to go on alone")
        second.send(signal.SIGCONT)
        job.until(lambda s: second.pid in trainers(s), "the thawed trainer to join anew")
        go.touch()
        assert job.wait(first, second) == [0] * 5
    assert digests(tmp_path / "model") == alone
