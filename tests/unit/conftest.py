"""Jobs inside the test's process."""

from collections.abc import Callable

import pytest
import torch

import evergrad as eg
from evergrad.job.embedded import embedded_session
from evergrad.job.job import Job
from evergrad.messages import Schema


@pytest.fixture
def new_job() -> Callable[..., Job]:
    """Begin a job as `eg.init` does, with as many pservers as asked for."""

    def make(pservers: int = 1, update: object = None, seed: int = 0) -> Job:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        local = update if isinstance(update, eg.LocalSGD) else None
        return Job(embedded_session(pservers), Schema(seed, (update or eg.Sync()).spec(), (), ()), True, local=local)

    return make


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}-pservers")
def pservers(request: pytest.FixtureRequest) -> int:
    """What holds for tables holds for any number of pservers."""
    return request.param
