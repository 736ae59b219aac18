"""However a job ends, it ends as a whole: a truthful status, a complete model or none, and no process left."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from jobs import COUNT, SCRIPTS, ByHand, Launched, digests, python, reached, trainers, until

WIDE = SCRIPTS / "wide.py"


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, go: Path, number: int, status: int) -> None:
    args = ("--rule", "async", "--out", tmp_path / "model", "--pause", 0.01, "--epochs", 100)
    with Launched(tmp_path, COUNT, *args, pservers=2) as job:
        job.until(lambda s: s.samples > 0, "training")
        family = job.family()
        assert len(family) == 4
        job.launcher.send(number)
        assert job.wait() == status
        assert all(map(is_gone, family))
        assert "The job was stopped." in job.text
        assert "Traceback" not in job.text
        assert all("Traceback" not in job.log(name) for name in ("master", "pserver-0", "pserver-1"))
    assert not (tmp_path / "model").exists()


def test_when_the_launcher_is_killed_all_others_leave_by_themselves(tmp_path: Path) -> None:
    args = ("--rule", "sync", "--out", tmp_path / "model", "--pause", 0.01, "--epochs", 100)
    with Launched(tmp_path, COUNT, *args, pservers=2) as job:
        job.until(lambda s: s.samples > 0, "training")
        family = job.family()
        assert len(family) == 4
        job.launcher.send(signal.SIGKILL)
        job.wait()
        until(lambda: all(map(is_gone, family)), "all to leave", within_s=15.0)


def test_when_the_leader_is_killed_while_it_saves_another_saves_the_whole_model(tmp_path: Path, go: Path) -> None:
    embedded = tmp_path / "embedded"
    done = python(WIDE, "--out", embedded, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "saved"
    folder.mkdir()
    with ByHand(tmp_path, pservers=2, lease_s=2.5) as job:
        both = [job.trainer(name, WIDE, "--out", folder / "model", "--hold", f"end={go}") for name in ("one", "two")]
        until(lambda: len(reached(go)) == 2, "both to come to the end")
        go.touch()
        leader = until(lambda: writer(folder), "the leader to begin to save", within_s=30.0)
        os.kill(leader, signal.SIGSTOP)
        assert writer(folder) == leader, "it had not finished"
        assert not (folder / "model").exists()
        os.kill(leader, signal.SIGKILL)
        other = next(trainer for trainer in both if trainer.pid != leader)
        assert job.wait(other) == [0] * 4
        assert next(trainer for trainer in both if trainer.pid == leader).wait() == -signal.SIGKILL
    assert digests(folder / "model") == digests(embedded)


def writer(folder: Path) -> int | None:
    """The pid of the process that is writing a model beside its final place."""
    unfinished = [p for p in folder.glob(".model.*") if not p.name.endswith(".old")]
    return int(unfinished[0].name.split(".")[2]) if unfinished else None


@pytest.mark.parametrize("role", ["pserver-1", "master"])
def test_a_pserver_or_master_that_may_not_be_restarted_ends_the_job_with_a_sentence_that_names_it(
    tmp_path: Path, role: str
) -> None:
    args = ("--rule", "sync", "--out", tmp_path / "model", "--pause", 0.01, "--epochs", 100)
    with Launched(tmp_path, COUNT, *args, pservers=2, options=("--max-restarts", "0")) as job:
        job.until(lambda s: s.samples > 0, "training")
        pid = job.hit(role)[role]
        assert job.wait() == 1
        assert f"{role} (pid {pid}) was killed by SIGKILL; see " in job.text


def test_a_trainer_added_by_hand_carries_on_alone_where_the_launchers_own_may_not_be_restarted(
    tmp_path: Path, go: Path
) -> None:
    args = ("--rule", "sync", "--out", tmp_path / "model", "--hold", f"epoch:0={go}")
    with Launched(tmp_path, COUNT, *args, options=("--max-restarts", "0")) as job:
        own = until(lambda: reached(go), "the launcher's trainer to be inside a batch")
        joiner = job.join()
        job.until(lambda s: joiner.pid in trainers(s), "the added trainer to join")
        # The launcher asks twice a second; what it prints shows that it has seen the joiner too.
        until(lambda: f"(pid {joiner.pid}) has joined" in job.text, "the launcher to know")
        os.kill(own.pop(), signal.SIGKILL)
        go.touch()
        assert job.wait() == 0, job.text
        assert joiner.wait() == 0, joiner.text
        assert "was killed by SIGKILL; the job goes on without it" in job.text
