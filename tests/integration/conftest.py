"""What the tests of whole jobs share: the models that they must all end with."""

from functools import cache
from pathlib import Path

import pytest
from jobs import TRAIN, Alone, digests, python


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The digests of the model that `python SCRIPT --seed N` saves: the reference for every job."""

    @cache
    def train(seed: int, script: Path = TRAIN) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("alone")
        model = folder / "model"
        done = python(script, "--out", model, "--seed", seed, cwd=folder)
        assert done.returncode == 0, done.stderr
        return digests(model)

    return train


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file that a script can be told to wait for."""
    return tmp_path / "go"
