"""Every sample of an epoch is trained exactly once, counted by the traces that gradients leave (`scripts/count.py`)."""

import os
import random
import signal
from pathlib import Path

import pytest
from jobs import COUNT, ByHand, Job, Launched, at_work, is_inside, reached, trainers, until
from traces import miscounted, updates

SAMPLES, EPOCHS, BATCH = 1500, 2, 16


def arguments(folder: Path, rule: str, *more: object) -> tuple[object, ...]:
    (folder / "diary").mkdir()
    sizes = ("--samples", SAMPLES, "--epochs", EPOCHS, "--batch-size", BATCH)
    return "--rule", rule, "--out", folder / "model", "--diary", folder / "diary", *sizes, *more


def computed(folder: Path, pid: int) -> int:
    """How many batches a process was in."""
    file = folder / "diary" / str(pid)
    return len(file.read_text().splitlines()) if file.exists() else 0


def victim(job: Job, step: int, chance: random.Random, spared: int = 0) -> int:
    """A trainer to hurt now: it holds a task, in the first epoch, at this step or later; another is there too."""
    hit = job.until(
        lambda s: is_inside(s, step, epoch=0) and set(at_work(s)) - {spared} and len(trainers(s)) > 1, f"step {step}"
    )
    pid = chance.choice([pid for pid in at_work(hit) if pid != spared])
    print(f"hurt {pid}, {trainers(hit)[pid].doing}; the job was at step {hit.step} of {hit.steps}")
    return pid


@pytest.mark.parametrize("rule", ["sync", "async"])
def test_every_sample_is_applied_once_with_trainers_killed_told_to_leave_and_added(
    tmp_path: Path, go: Path, seed: int, rule: str
) -> None:
    chance = random.Random(seed)
    args = arguments(tmp_path, rule, "--pause", 0.03, "--hold", f"epoch:1={go}")
    steps = updates(rule, SAMPLES, BATCH) if rule == "sync" else -(-updates(rule, SAMPLES, BATCH) // 3)
    with Launched(tmp_path, COUNT, *args, pservers=2, trainers=3) as job:
        killed = victim(job, chance.randrange(1, steps // 2), chance)
        os.kill(killed, signal.SIGKILL)
        joiner = job.join()
        told = victim(job, 1, chance, spared=killed)
        os.kill(told, signal.SIGTERM)
        notes = " ".join(job.gone(killed).notes + job.gone(told).notes)
        assert "has ended" in notes
        assert "said goodbye" in notes
        until(lambda: joiner.pid in reached(go), "the added trainer to be inside epoch 1")
        go.touch()
        assert job.wait() == 0, job.text
        assert joiner.wait() == 0, joiner.text
    assert computed(tmp_path, joiner.pid) > 0
    assert miscounted(tmp_path / "model", rule, SAMPLES, EPOCHS, BATCH) == ""


@pytest.mark.parametrize("rule", ["sync", "async"])
def test_a_frozen_trainer_that_comes_back_in_the_middle_of_its_task_applies_nothing_twice(
    tmp_path: Path, go: Path, rule: str
) -> None:
    frozen_at = tmp_path / "frozen"
    args = arguments(tmp_path, rule, "--pause", 0.01)
    with ByHand(tmp_path, pservers=2, lease_s=2.5) as job:
        frozen = job.trainer("frozen", COUNT, *args, "--hold", f"epoch:0={frozen_at}", "--hold", f"epoch:1={go}")
        until(lambda: frozen.pid in reached(frozen_at), "it to be inside a batch")
        frozen.send(signal.SIGSTOP)
        frozen_at.touch()
        job.gone(frozen.pid)
        other = job.trainer("other", COUNT, *args, "--hold", f"epoch:1={go}")
        until(lambda: other.pid in reached(go), "the other to do all of epoch 0")
        frozen.send(signal.SIGCONT)
        job.until(lambda s: frozen.pid in trainers(s), "it to join anew")
        go.touch()
        assert job.wait(frozen, other) == [0] * 5
    assert miscounted(tmp_path / "model", rule, SAMPLES, EPOCHS, BATCH) == ""
