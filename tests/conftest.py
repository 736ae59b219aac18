"""What every test is held to: nothing it started may outlive it; and its random numbers can be had again.

`EVERGRAD_TEST_SEED=N make test` runs with the seed that an earlier run printed.
"""

import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import psutil
import pytest

GRACE_S = 5.0
"""How long what a test has ended may take to be gone."""
SEED = int(os.environ.setdefault("EVERGRAD_TEST_SEED", str(random.SystemRandom().randrange(2**31))))
"""Of the run, in each of its processes."""
PR_SET_CHILD_SUBREAPER = 36
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: on busy cores its threads wait for each other

hypothesis.settings.register_profile("evergrad", deadline=None, print_blob=True)
hypothesis.settings.load_profile("evergrad")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis our seed, and become the parent of orphans, so that they are seen as leaks."""
    if config.getoption("hypothesisseed", None) is None:
        config.option.hypothesisseed = str(SEED)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_report_header() -> str:
    return f"seed: {SEED} (again with EVERGRAD_TEST_SEED={SEED})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"seed: {SEED} (again with EVERGRAD_TEST_SEED={SEED})")


@pytest.fixture
def seed() -> int:
    """The run's seed, printed when a test fails."""
    print(f"seed: {SEED}")
    return SEED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED % 2**32)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = _open_things()
    yield
    leaked = _leaked_since(before)
    if leaked:
        gc.collect()
        deadline = time.monotonic() + GRACE_S
        while (leaked := _leaked_since(before)) and time.monotonic() < deadline:
            time.sleep(0.01)
    if leaked:
        pytest.fail("left behind: " + ", ".join(sorted(leaked)), pytrace=False)


def _leaked_since(before: dict[str, object]) -> set[str]:
    return {name for name, thing in _open_things().items() if before.get(name) != thing}


def _open_things() -> dict[str, object]:
    return _threads() | _children() | _sockets()


def _threads() -> dict[str, object]:
    return {f"thread {t.name}": t.ident for t in threading.enumerate() if t.is_alive()}


def _children() -> dict[str, object]:
    return {f"process {p.pid} ({_command(p)})": p.create_time() for p in psutil.Process().children() if _runs(p)}


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in _command(process)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.Error:
        return "gone"


def _sockets() -> dict[str, object]:
    """Open sockets, and the pollers that a ZeroMQ context holds while it is open."""
    things: dict[str, object] = {}
    for link in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:"):
            things[f"socket {target}"] = target
        elif target == "anon_inode:[eventpoll]":
            things[f"poller or ZeroMQ context (file {link.name})"] = target
    return things


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds: `eventually(lambda: path.exists(), within_s=10)`."""

    def wait(condition: Callable[[], object], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not so within {within_s} s"
            time.sleep(0.01)

    return wait
