"""What a job begins with: the checkpoint asked for, or none, on any number of processes; and what it refuses."""

import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from jobs import TRAIN, Alone, Launched, Running, digests, is_inside, python, reached, until

from evergrad.checkpoint.catalogue import entries
from evergrad.checkpoint.storage import Storage


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that one process has made: of the beginning, each tenth step, and both epochs' ends."""
    folder = tmp_path_factory.mktemp("trained")
    done = python(TRAIN, "--out", folder / "model", "--every", 10, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "checkpoints"


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> Path:
    """The same, to be written to."""
    return Path(shutil.copytree(trained, tmp_path / "checkpoints"))


def in_the_middle(folder: Path) -> int:
    """The serial of a checkpoint inside epoch 1."""
    with Storage(folder) as storage:
        manifests = [e.manifest for e in entries(storage) if e.manifest is not None]
    return next(m.serial for m in manifests if m.progress.epoch == 1 and not m.progress.is_closed)


@pytest.mark.parametrize(("pservers", "trainers", "name"), [(3, 2, "epoch_0"), (2, 1, "a serial")])
def test_the_checkpoint_named_is_gone_on_with(
    tmp_path: Path, trained: Path, alone: Alone, pservers: int, trainers: int, name: str
) -> None:
    serial = in_the_middle(trained)
    path = trained / (name if name == "epoch_0" else f"checkpoint_{serial}")
    options = ("--checkpoints", str(tmp_path / "new"), "--resume", str(path))
    args = ("--out", tmp_path / "model")
    with Launched(tmp_path, TRAIN, *args, pservers=pservers, trainers=trainers, options=options) as job:
        assert job.wait() == 0, job.text
        found = re.search(r"generation 1 begins with checkpoint (\d+): ([\d,]+) rows", job.text)
        assert found, job.text
        assert name == "epoch_0" or int(found[1]) == serial
        assert int(found[2].replace(",", "")) > 500
        assert re.search(r"1 of 2 epochs|2 of 2 epochs", job.text)
    assert digests(tmp_path / "model") == alone(0)
    assert not (trained / ".evergrad-lock").read_text().startswith("20"), "it was only read"


def test_a_job_that_is_not_to_resume_begins_anew_and_keeps_the_others_checkpoints(
    tmp_path: Path, checkpoints: Path, alone: Alone
) -> None:
    before = {p.name for p in checkpoints.iterdir()}
    options = ("--checkpoints", str(checkpoints), "--resume", "never")
    with Launched(tmp_path, TRAIN, "--out", tmp_path / "model", options=options) as job:
        assert job.wait() == 0, job.text
        assert "epoch 0 (of 2) begins: 32 steps" in job.text
        assert "generation 1 begins" not in job.text
    assert digests(tmp_path / "model") == alone(0)
    assert before <= {p.name for p in checkpoints.iterdir()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("--dim", 4),
            r"is not of this model: table 'item' has dim 4, the checkpoint's 8; run the script that made it",
        ),
        (("--samples", 1999), r"batches: this trainer's data is not the job's \(samples 2000 and 1999; content"),
    ],
    ids=["another dim", "other data in the middle of an epoch"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_one_sentence_and_status_2(
    tmp_path: Path, trained: Path, change: tuple[object, ...], reason: str
) -> None:
    options = ("--resume", str(trained / f"checkpoint_{in_the_middle(trained)}"))
    with Launched(tmp_path, TRAIN, "--out", tmp_path / "model", *change, options=options) as job:
        assert job.wait() == 2, job.text
        assert re.search(reason, job.text.strip().splitlines()[-1]), "the last line says why"
        assert "Traceback" not in job.text
    assert not (tmp_path / "model").exists()


def test_two_jobs_with_one_folder_the_second_is_refused(tmp_path: Path, go: Path) -> None:
    options = ("--checkpoints", str(tmp_path / "checkpoints"))
    args = ("--out", tmp_path / "model", "--epochs", 1)
    with Launched(tmp_path / "first", TRAIN, *args, "--hold", f"epoch:0={go}", options=options) as first:
        until(lambda: reached(go), "the first to train")
        with Launched(tmp_path / "second", TRAIN, *args, options=options) as second:
            assert second.wait() == 2, second.text
            name, _ = first.found() or ("", "")
            said = f"job {name} makes its checkpoints in {tmp_path / 'checkpoints'}; give each job"
            assert said in second.text.strip().splitlines()[-1]
        go.touch()
        assert first.wait() == 0, first.text


def test_a_run_of_one_process_that_was_killed_is_gone_on_with_by_the_next(
    tmp_path: Path, alone: Alone, go: Path
) -> None:
    args = ("--out", tmp_path / "model", "--every", 4)
    script = Running([sys.executable, TRAIN, *args, "--hold", f"epoch:1={go}"], tmp_path / "first.out")
    try:
        until(lambda: reached(go), "the second epoch")
        script.send(signal.SIGKILL)
        assert script.wait() == -signal.SIGKILL
    finally:
        script.kill()
    done = python(TRAIN, *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 1 totals" in done.stdout
    assert digests(tmp_path / "model") == alone(0)


def test_a_disk_that_is_full_for_a_while_stops_nothing_and_is_told(tmp_path: Path, alone: Alone) -> None:
    args = ("--out", tmp_path / "model", "--pause", 0.05, "--every", 3)
    with Launched(tmp_path, TRAIN, *args, pservers=2, trainers=2) as job:
        job.until(lambda s: s.checkpoints and s.checkpoints.made > 1, "checkpoints")
        pserver = job.members()["pserver-1"]
        pserver.rlimit(psutil.RLIMIT_FSIZE, (64, psutil.RLIM_INFINITY))  # of any file it writes
        failing = job.until(lambda s: s.checkpoints and s.checkpoints.failure, "one to fail")
        job.until(lambda s: is_inside(s) and s.version > failing.version + 3, "training to go on")
        pserver.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        job.until(lambda s: s.checkpoints and not s.checkpoints.failure, "one to be complete again")
        assert job.wait() == 0, job.text
        assert "the storage is full (File too large); make room; training goes on" in job.text
        assert re.search(
            r"checkpoints: \d+ is the newest \(epoch 1, its end, \d+ s ago\), \d+ made, [1-9] failed", job.text
        )
    assert digests(tmp_path / "model") == alone(0)


ENDING = """
import sys
import numpy as np
from torch import nn
import evergrad as eg

job = eg.init(update=eg.Sync(), checkpoints=eg.Checkpoints("checkpoints"))
user = eg.Embedding("user", 4)
optimizer = job.optimizer(nn.ModuleList([user]), dense=eg.SGD(lr=0.1), sparse=eg.SGD(lr=0.1))
number = 0
for epoch in job.epochs(2):
    for batch in job.batches({"user": np.arange(64)}, batch_size=4):
        optimizer.zero_grad()
        user(batch["user"]).sum().backward()
        optimizer.step()
        number += 1
        if number == 5:
            END
"""


@pytest.mark.parametrize(("end", "status"), [("1 / 0", 1), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2)])
def test_a_run_of_one_process_that_ends_early_leaves_a_checkpoint_of_where_it_was(
    tmp_path: Path, end: str, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING.replace("END", end))
    done = python(script, cwd=tmp_path)
    assert done.returncode in (status, 128 - status), done.stderr
    assert done.stderr.count("Traceback") == (status != 3), done.stderr
    with Storage(tmp_path / "checkpoints") as storage:
        assert [e.manifest.progress.version for e in entries(storage) if e.manifest] == [0, 5]


def test_roles_that_are_told_to_stop_by_themselves_make_a_checkpoint_first(tmp_path: Path, alone: Alone) -> None:
    args = ("--out", tmp_path / "model", "--pause", 0.05, "--every", 1000)
    with Launched(tmp_path / "first", TRAIN, *args, pservers=2, trainers=2) as job:
        status = job.until(lambda s: is_inside(s, 5), "steps")
        for name, process in job.members().items():
            if not name.startswith("trainer"):
                process.terminate()
        assert job.wait() == 1, job.text
        assert "the master was told to stop" in job.text
    with Storage(tmp_path / "checkpoints") as storage:
        newest = entries(storage)[-1].manifest
    assert newest is not None
    assert newest.progress.version >= status.version
    with Launched(tmp_path / "second", TRAIN, *args, pservers=2, trainers=2) as job:
        assert job.wait() == 0, job.text
    assert digests(tmp_path / "model") == alone(0)
