"""Whatever dies, the job goes on, and the model has the bits of one that nothing happened to."""

import os
import random
import signal
from pathlib import Path

import pytest
from jobs import FILMS, TRAIN, Alone, Launched, digests, python, until

from evergrad.messages import MemberStatus, Role, Status

OPTIONS = ("--max-restarts", "50")


def pid_of(status: Status, role: Role) -> int | None:
    """One of the processes with this role that are there."""
    return next((m.pid for m in status.members if m.role is role), None)


def master_of(job: Launched) -> int:
    """The master, which is no member."""
    return next(p.pid for p in job.family() if "evergrad.master" in " ".join(p.cmdline()))


def at_step(job: Launched, step: int) -> Status:
    """The job at this step or later, with all that it needs."""
    return job.until(lambda s: s.version >= step and s.phase == "training", f"step {step}", within_s=200.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pservers", [1, 2])
def test_a_pserver_that_is_killed_costs_no_bit(tmp_path: Path, alone: Alone, pservers: int) -> None:
    args = ("--out", tmp_path / "model", "--pause", 0.02)
    with Launched(tmp_path, TRAIN, *args, pservers=pservers, trainers=2, options=OPTIONS) as job:
        for step in (10, 45):
            victim = pid_of(at_step(job, step), Role.PSERVER)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            job.until(lambda s, victim=victim: victim not in [m.pid for m in s.members], "the pserver to be missed")
        assert job.launcher.wait(120.0) == 0, job.text
        assert "generation 3 begins with checkpoint" in job.text
    assert digests(tmp_path / "model") == alone(0)


@pytest.mark.timeout(300)
def test_a_master_that_is_killed_is_followed_by_one_that_goes_on(tmp_path: Path, alone: Alone) -> None:
    args = ("--out", tmp_path / "model", "--pause", 0.02)
    with Launched(tmp_path, TRAIN, *args, pservers=2, trainers=2, options=OPTIONS) as job:
        for step in (10, 45):
            at_step(job, step)
            victim = master_of(job)
            os.kill(victim, signal.SIGKILL)
            until(lambda victim=victim: not Path(f"/proc/{victim}").exists(), "the end of the master")
        assert job.launcher.wait(120.0) == 0, job.text
        assert "a new master goes on in term 3, without falling back" in job.text
        assert "begins with checkpoint" not in job.text
    assert digests(tmp_path / "model") == alone(0)


@pytest.mark.timeout(400)
def test_whoever_is_killed_at_whatever_moment_the_bits_are_the_same(tmp_path: Path, alone: Alone, seed: int) -> None:
    chance = random.Random(seed)
    args = ("--out", tmp_path / "model", "--pause", 0.05)
    with Launched(tmp_path, FILMS, *args, pservers=2, trainers=2, options=OPTIONS) as job:
        for step in sorted(chance.sample(range(1, 80), 6)):
            status = at_step(job, step)
            kind = chance.choice(("pserver", "trainer", "master"))
            of_kind: list[MemberStatus] = [m for m in status.members if m.role.value == kind]
            victim = master_of(job) if kind == "master" else chance.choice(of_kind).pid if of_kind else None
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
        assert job.launcher.wait(200.0) == 0, job.text
    assert digests(tmp_path / "model") == alone(0, FILMS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "pservers"), [(signal.SIGKILL, 2), (signal.SIGTERM, 3)])
def test_a_job_of_which_nothing_is_left_goes_on_when_it_is_started_again(
    tmp_path: Path, alone: Alone, number: signal.Signals, pservers: int
) -> None:
    options = ("--checkpoints", str(tmp_path / "checkpoints"))
    args = ("--out", tmp_path / "model", "--pause", 0.02)
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    with Launched(first, TRAIN, *args, pservers=2, trainers=2, options=options) as job:
        at_step(job, 40)
        if number is signal.SIGKILL:
            for process in (*job.family(), job.launcher):
                os.kill(process.pid, signal.SIGKILL)
        else:
            job.launcher.send(number)
            assert job.launcher.wait(60.0) == 128 + number
    assert not (tmp_path / "model").exists()
    with Launched(second, TRAIN, *args, pservers=pservers, trainers=1, options=options) as job:
        assert job.launcher.wait(120.0) == 0, job.text
        assert "generation 1 begins with checkpoint" in job.text
    assert digests(tmp_path / "model") == alone(0)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    options = ("--checkpoints", str(tmp_path / "checkpoints"))
    args = ("--out", tmp_path / "model", "--samples", 200, "--epochs", 1)
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    with Launched(first, TRAIN, *args, options=options) as job:
        assert job.wait() == 0, job.text
    with Launched(second, TRAIN, *args, "--dim", 4, options=options) as job:
        assert job.launcher.wait(60.0) == 2, job.text
        assert "dim 4, the checkpoint's 8" in job.text
        assert "Traceback" not in job.text


def test_what_export_makes_of_the_last_checkpoint_is_what_the_job_has_saved(tmp_path: Path) -> None:
    options = ("--checkpoints", str(tmp_path / "checkpoints"))
    with Launched(tmp_path, TRAIN, "--out", tmp_path / "model", "--samples", 500, options=options) as job:
        assert job.wait() == 0, job.text
    done = python("-m", "evergrad", "export", tmp_path / "checkpoints", tmp_path / "exported", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "exported") == digests(tmp_path / "model")
