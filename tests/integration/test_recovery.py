"""Whatever of a job is killed, it goes on: `Sync` with the same bits, `Async` with each sample counted once."""

import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from jobs import COUNT, FILMS, Alone, Launched, digests, is_inside, python, until
from traces import miscounted

from evergrad.checkpoint.catalogue import entries
from evergrad.checkpoint.storage import Storage
from evergrad.messages import Progress, Status

KINDS = ("trainer", "pserver", "master", "all")


def at_step(job: Launched, step: int, *, epoch: int = 0) -> Status:
    """The job at this step of an epoch, or later in it."""
    return job.until(lambda s: is_inside(s, step, epoch), f"step {step} of epoch {epoch}")


def fallen_back(job: Launched, before: Status) -> Status:
    """The job, once it trains in a newer generation."""
    return job.until(lambda s: s.generation > before.generation and is_inside(s), "the job to fall back and go on")


def progress_of(folder: Path) -> list[Progress]:
    """Where the good checkpoints there are, the oldest first."""
    with Storage(folder) as storage:
        return [e.manifest.progress for e in entries(storage) if e.manifest is not None]


@pytest.mark.timeout(300)
def test_whatever_is_killed_the_model_is_the_same_also_with_the_next_run_on_other_processes(
    tmp_path: Path, alone: Alone
) -> None:
    folder, model = tmp_path / "checkpoints", tmp_path / "model"
    args = ("--out", model, "--pause", 0.05, "--every", 5)
    with Launched(tmp_path / "first", FILMS, *args, pservers=2, trainers=2) as job:
        status = at_step(job, 8)
        job.hit("pserver-1")
        status = fallen_back(job, status)
        assert status.checkpoints is not None
        job.hit("master")
        later = job.until(lambda s: s.term > status.term and is_inside(s), "the next master to go on")
        assert later.generation == status.generation, "without falling back"
        job.hit("master", "pserver-0")
        status = fallen_back(job, later)
        assert status.term == 3
        gone = job.hit("trainer-0", "trainer-1").values()
        job.until(lambda s: s.members and not {m.pid for m in s.members} & set(gone), "their tasks to be given back")
        job.hit()
        fallen_back(job, status)
        at_step(job, 8, epoch=1)
        job.kill()
    assert (1, False) in [(p.epoch, p.is_closed) for p in progress_of(folder)], "in the middle of an epoch"
    with Launched(tmp_path / "second", FILMS, *args, pservers=3, trainers=1) as job:
        status = job.until(is_inside, "the next run to go on")
        assert status.epoch == 1
        begun = status.version
        job.until(lambda s: s.version > begun, "a step")
        job.launcher.send(signal.SIGTERM)
        assert job.wait() == 143, job.text
        stopped_at = progress_of(folder)[-1].version
        assert stopped_at >= begun
        assert f"is the newest (epoch 1, version {stopped_at}" in job.text
    with Launched(tmp_path / "third", FILMS, *args, pservers=1, trainers=2) as job:
        assert job.until(is_inside, "the last run to go on").version >= stopped_at
        assert job.wait() == 0, job.text
    assert digests(model) == alone(0, FILMS)
    exported = python("-m", "evergrad", "export", folder, tmp_path / "exported", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert digests(tmp_path / "exported") == digests(model)


@pytest.mark.timeout(300)
def test_the_model_is_the_same_after_kills_of_random_processes(tmp_path: Path, alone: Alone, seed: int) -> None:
    chance = random.Random(seed)
    args = ("--out", tmp_path / "model", "--pause", 0.03, "--every", 8)
    kinds = [*KINDS, *chance.choices(KINDS, k=2)]
    chance.shuffle(kinds)
    struck: Counter[str] = Counter()
    with Launched(tmp_path, FILMS, *args, pservers=2, trainers=2, options=("--max-restarts", "20")) as job:
        for kind in kinds:
            at_work = job.until(is_inside, "the job to train")
            job.until(lambda s, v=at_work.samples: is_inside(s) and s.samples > v, f"a task, before {kind}")  # type: ignore[misc]
            there = sorted(name for name in job.members() if kind in ("all", name.partition("-")[0]))
            killed = job.hit(*(there if kind == "all" else [chance.choice(there)]))
            until(lambda k=killed: all(f"(pid {pid}) was killed" in job.text for pid in k.values()), "it to be noticed")  # type: ignore[misc]
            struck[kind] += 1
            print(f"killed {killed}")
        assert job.launcher.wait(200.0) == 0, job.text
    assert struck.total() == 6
    assert digests(tmp_path / "model") == alone(0, FILMS)


@pytest.mark.timeout(300)
def test_in_async_each_sample_is_applied_once_though_pservers_and_masters_are_killed_and_the_job_is_stopped(
    tmp_path: Path,
) -> None:
    samples, epochs, batch = 1500, 2, 16
    sizes = ("--samples", samples, "--epochs", epochs, "--batch-size", batch)
    args = ("--rule", "async", "--out", tmp_path / "model", "--pause", 0.05, "--every", 9, *sizes)
    with Launched(tmp_path / "first", COUNT, *args, pservers=2, trainers=2) as job:
        status = job.until(lambda s: s.checkpoints and s.checkpoints.made > 1, "a checkpoint in the epoch")
        job.hit("pserver-0")
        status = fallen_back(job, status)
        job.hit("master")
        status = job.until(lambda s, t=status.term: s.term > t and is_inside(s), "the next master")  # type: ignore[misc]
        job.hit("master", "pserver-1")
        status = fallen_back(job, status)
        job.launcher.send(signal.SIGINT)
        assert job.wait() == 130, job.text
    stopped = progress_of(tmp_path / "checkpoints")[-1]
    assert not stopped.is_closed
    assert stopped.standing
    with Launched(tmp_path / "second", COUNT, *args, pservers=3, trainers=1) as job:
        assert job.wait() == 0, job.text
    assert miscounted(tmp_path / "model", "async", samples, epochs, batch) == ""
