"""`evergrad run` with the real roles and small scripts."""

import subprocess
import sys
from pathlib import Path

TRAIN = """
import sys
import numpy as np
import torch
import evergrad as eg

job = eg.init(update=eg.Sync(batches_per_step=2), seed=3)
model = torch.nn.Linear(2, 1)
optimizer = job.optimizer(model, dense=eg.SGD(lr=0.1))
data = eg.data.Columns({"x": np.ones((64, 2), np.float32), "y": np.zeros(64, np.float32)})
for epoch in job.epochs(2):
    for batch in job.batches(data, batch_size=8):
        optimizer.zero_grad()
        (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean().backward()
        optimizer.step()
if job.is_leader():
    print("my arguments:", sys.argv[1:])
"""


def run(folder: Path, script: str, *args: str, trainers: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    argv = [sys.executable, "-m", "evergrad", "run", "--trainers", str(trainers), "train.py", *args]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=100)


def test_a_job_of_processes_trains_to_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The job ended well." in done.stdout
    assert "2 of 2 epochs, 8 steps, 128 samples" in done.stdout


def test_what_follows_the_script_is_passed_to_it_untouched(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN, "--epochs", "5", "--trainers", "x", "--", "-h", "", trainers=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my arguments: ['--epochs', '5', '--trainers', 'x', '--', '-h', '']" in done.stdout


def test_the_traceback_of_a_script_that_raises_is_shown_once_and_the_status_is_1(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN.replace("optimizer.step()", "optimizer.step()\n        raise ValueError('no column')"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("Traceback (most recent call last)") == 1
    assert done.stdout.rstrip().endswith("ValueError: no column")
    assert "The job failed." in done.stdout


def test_a_mistake_in_the_script_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    done = run(tmp_path, TRAIN.replace("batches_per_step=2", "batches_per_step=0"), trainers=1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "batches_per_step is 0" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
