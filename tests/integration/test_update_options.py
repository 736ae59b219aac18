"""Options of update rules, and scripts that raise, with real processes."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from jobs import SCRIPTS, ByHand, Launched, reached, trainers, until
from numpy.typing import NDArray
from safetensors.numpy import load_file

MARKS = SCRIPTS / "marks.py"


def marks(model: Path, samples: int) -> tuple[NDArray[np.float32], float]:
    """Each sample's share in the updates of each epoch, and how many updates there were."""
    table = load_file(model / "tables" / "mark.safetensors")
    shares = np.zeros((samples, table["values"].shape[1]), np.float32)
    shares[table["keys"]] = -table["values"]
    return shares, -float(load_file(model / "dense.safetensors")["applied"][0])


def said(pattern: str, text: str) -> list[int]:
    """The numbers that a job's console shows."""
    return [int(number.replace(",", "")) for number in re.findall(pattern, text)]


# -- late batches ------------------------------------------------------------------------------------------------------


def test_steps_are_committed_without_batches_that_are_late_and_what_was_dropped_is_counted(tmp_path: Path) -> None:
    samples, options = 240, "{'batches_per_step': 2, 'drop_after': 0.5}"
    args = ("--rule", "Sync", "--with", options, "--samples", samples, "--batch-size", 4, "--epochs", 1)
    slow = ("--out", tmp_path / "model", "--pause", 0.01, "--slow", "trainer-1", "--slow-for", 2.0)
    with Launched(tmp_path, MARKS, *args, *slow, pservers=2, trainers=2) as job:
        assert job.wait() == 0, job.text
        assert "The job ended well." in job.text
        (dropped,) = said(
            r"dropped: ([\d,]+) samples that came too late for their step, so not the same bits", job.text
        )
        assert "samples were dropped that came too late (drop_after): the same bits cannot be promised" in job.text
    shares, updates = marks(tmp_path / "model", samples)
    assert dropped > 0
    assert dropped % 4 == 0
    assert (shares == 0).sum() == dropped
    assert set(shares.ravel().tolist()) == {0.0, 0.5, 1.0}, "the mean is over the samples that came"
    assert (shares == 1.0).sum() == dropped, "each batch that was dropped left one alone in its step"
    assert updates == 30


# -- scripts that raise ------------------------------------------------------------------------------------------------


def test_a_task_in_which_the_script_raises_is_set_aside_and_the_job_ends_with_status_1(tmp_path: Path) -> None:
    samples, options = 96, "{'batches_per_step': 2}"
    args = ("--rule", "Sync", "--with", options, "--samples", samples, "--batch-size", 8, "--epochs", 1)
    bad = ("--out", tmp_path / "model", "--raise-at", 7)
    limits = ("--max-failures", "2", "--max-restarts", "0")
    with Launched(tmp_path, MARKS, *args, *bad, pservers=2, trainers=2, options=limits) as job:
        assert job.wait() == 1, job.text
        assert re.search(r"set aside: epoch 0, step \d, task \d \(8 samples\): ValueError: sample 7 is bad", job.text)
        assert "the script raised in 1 task until they were set aside, and 8 samples were left out" in job.text
        assert job.text.count("left since its script raised; it starts again in 0.5 s") == 2
        assert "Traceback" not in job.text
        assert job.log("master").count("ValueError: sample 7 is bad") >= 2
        assert "marks.py" in job.log("master")
    shares, updates = marks(tmp_path / "model", samples)
    assert (shares == 0).sum() == 8
    assert shares[7] == 0
    assert updates == 6


def test_data_that_cannot_be_read_leaves_out_the_rest_of_its_task(tmp_path: Path) -> None:
    samples = 96
    args = ("--rule", "Async", "--with", "{'batches_per_task': 3}", "--samples", samples, "--batch-size", 4)
    bad = ("--epochs", 1, "--out", tmp_path / "model", "--unreadable", 50)
    with Launched(tmp_path, MARKS, *args, *bad, pservers=2, trainers=2) as job:
        assert job.wait() == 1, job.text
        (left_out,) = said(
            r"set aside: epoch 0, task \d \((\d+) samples\): DataError: sample 50 cannot be read", job.text
        )
        assert job.text.count("left since its script raised") >= 2
    shares, updates = marks(tmp_path / "model", samples)
    assert (shares == 0).sum() == left_out
    assert left_out in (4, 8, 12)
    assert shares[50] == 0
    assert updates == 24 - left_out // 4


# -- bounded staleness -------------------------------------------------------------------------------------------------


def leads(course: Path) -> list[int]:
    """At each beginning of a batch, how many batches more than the others its trainer had done.

    Up to the last of the trainer that ends first: then it has no task any more.
    """
    events = [(int(pid), what) for pid, what in map(str.split, course.read_text().splitlines())]
    done = {pid: 0 for pid, _ in events}
    last = min(max(i for i, (pid, _) in enumerate(events) if pid == one) for one in done)
    found = []
    for pid, what in events[: last + 1]:
        if what == "done":
            done[pid] += 1
        else:
            found.append(done[pid] - min(done.values()))
    return found


@pytest.mark.parametrize(("most", "ahead"), [(0, False), (2, True)])
def test_a_fast_trainer_waits_for_a_slow_one_and_the_status_says_so(
    tmp_path: Path, go: Path, most: int, ahead: bool
) -> None:
    samples, course = 160, tmp_path / "course"
    options = f"{{'batches_per_task': 5, 'max_staleness': {most}, 'ahead': {ahead}}}"
    args = ("--rule", "Async", "--with", options, "--samples", samples, "--batch-size", 8, "--epochs", 1)
    slow = ("--out", tmp_path / "model", "--course", course, "--slow", "trainer-1", "--hold", f"epoch:0={go}")
    with Launched(tmp_path, MARKS, *args, *slow, pservers=2, trainers=2) as job:
        until(lambda: len(reached(go)) == 2, "both to be in their first batch")
        go.touch()
        job.until(
            lambda s: any(m.doing.startswith("waits for trainer-1, ") for m in s.members), "one to wait for the other"
        )
        assert job.wait() == 0, job.text
    assert max(leads(course)) == most
    shares, updates = marks(tmp_path / "model", samples)
    assert (shares == 1).all()
    assert updates == 20


def test_a_frozen_trainer_holds_the_others_up_for_no_longer_than_its_lease(tmp_path: Path, go: Path) -> None:
    samples, options = 640, "{'batches_per_task': 5, 'max_staleness': 1}"
    args = ("--rule", "Async", "--with", options, "--samples", samples, "--batch-size", 8, "--epochs", 1)
    more = ("--out", tmp_path / "model", "--pause", 0.01, "--hold", f"epoch:0={go}")
    with ByHand(tmp_path, pservers=2, lease_s=2.5) as job:
        one, frozen = (job.trainer(name, MARKS, *args, *more) for name in ("one", "frozen"))
        until(lambda: len(reached(go)) == 2, "both to be in their first batch")
        frozen.send(signal.SIGSTOP)
        go.touch()
        status = job.until(lambda s: s.waiting_for.startswith("frozen, "), "the other to wait", within_s=20.0)
        assert re.fullmatch(r"frozen, [12] batches behind one \(max_staleness\)", status.waiting_for)
        job.gone(frozen.pid)
        job.until(lambda s: s.samples >= samples // 2, "the other to go on")
        frozen.send(signal.SIGCONT)
        job.until(lambda s: frozen.pid in trainers(s) or s.ended, "it to join anew")
        assert job.wait(one, frozen) == [0] * 5
    shares, updates = marks(tmp_path / "model", samples)
    assert (shares == 1).all()
    assert updates == 80


# -- batches pushed in groups ------------------------------------------------------------------------------------------


def test_every_batch_of_a_group_counts_once_with_a_trainer_killed(tmp_path: Path) -> None:
    samples, options = 1024, "{'batches_per_task': 8, 'push_every': 2, 'pull_every': 3}"
    args = ("--rule", "Async", "--with", options, "--samples", samples, "--batch-size", 8, "--epochs", 2)
    with Launched(tmp_path, MARKS, *args, "--out", tmp_path / "model", "--pause", 0.02, pservers=2, trainers=2) as job:
        for step in (1, 5, 9):
            hit = job.until(lambda s, step=step: s.epoch == 0 and step <= s.step < s.steps, f"step {step}")
            os.kill(next(iter(trainers(hit))), signal.SIGKILL)
            job.gone(next(iter(trainers(hit))))
        assert job.wait() == 0, job.text
    shares, updates = marks(tmp_path / "model", samples)
    assert (shares == 0.5).all()
    assert updates == 2 * samples // 16
