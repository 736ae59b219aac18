"""The `evergrad` command as a user types it."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evergrad.version import VERSION

STAND_IN = Path(__file__).with_name("stand_in.py")
COMMANDS = ["run", "status", "master", "pserver", "trainer", "export", "reshard"]
OF_CHECKPOINTS = ["ls", "show", "verify", "rm"]


def evergrad(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "evergrad", *args]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    done = evergrad("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"evergrad {VERSION}\n")


def test_without_a_command_the_help_is_shown(tmp_path: Path) -> None:
    done = evergrad(cwd=tmp_path)
    assert done.returncode == 2
    assert all(f"  {command} " in done.stderr for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *(f"checkpoints {command}" for command in OF_CHECKPOINTS)])
def test_each_command_has_help_with_an_example(tmp_path: Path, command: str) -> None:
    done = evergrad(*command.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert f"  Example:\n    evergrad {command}" in done.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument 'SCRIPT'"),
        (["run", "no.py"], "there is no script 'no.py'"),
        (["run", "."], "there is no script '.'"),
        (["run", "--trainers", "0", "train.py"], "--trainers"),
        (["run", "--pservers", "-1", "train.py"], "--pservers"),
        (["run", "--pservers", "two", "train.py"], "--pservers"),
        (["run", "--max-restarts", "-1", "train.py"], "--max-restarts"),
        (["run", "--nonsense", "train.py"], "No such option: --nonsense"),
        (["run", "--log-dir", "train.py", "train.py"], "choose another --log-dir"),
        (["status"], "no job is running"),
        (["status", "--job", "films"], "--master and --job belong together"),
        (["status", "--job", "films", "--master", "tcp://10.1.2.3:5"], "is beyond this machine"),
        (["status", "--job", "films", "--master", "here"], "'here' is no address"),
        (["master"], "Missing option '--job'"),
        (["pserver", "--place", "-1"], "--place"),
        (["pserver", "--place", "0"], "no job is running"),
        (["trainer", "train.py"], "no job is running"),
        (["trainer", "--master", "tcp://127.0.0.1:5", "--job", "films", "no.py"], "there is no script 'no.py'"),
        (["trainer", "--master", "tcp://127.0.0.1:5", "--job", "films"], "name a script"),
        (["checkpoints", "ls"], "Missing argument 'URL'"),
        (["checkpoints", "fly"], "No such command 'fly'"),
        (["export", "checkpoints"], "Missing argument 'OUT'"),
        (["reshard", "checkpoints", "out", "--pservers", "0"], "--pservers"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence_and_status_2(tmp_path: Path, args: list[str], sentence: str) -> None:
    (tmp_path / "train.py").write_text("")
    done = evergrad(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("evergrad: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_importing_the_command_imports_neither_a_role_nor_what_takes_long() -> None:
    slow = {"torch", "evergrad.master", "numba", "fsspec", "safetensors"}
    program = f"import sys, evergrad.cli; print([m for m in sys.modules if m in {slow}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.fixture
def running(tmp_path: Path, eventually: Callable[..., None]) -> Iterator[subprocess.Popen[bytes]]:
    """A job of stand-ins whose logs are in `evergrad-logs`."""
    script = tmp_path / "script.py"
    script.write_text("import threading; (folder / 'ready').touch(); threading.Event().wait(60)")
    argv = [sys.executable, str(STAND_IN), "launch", str(tmp_path), str(script)]
    launcher = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    (tmp_path / "evergrad-logs").symlink_to("logs")
    eventually((tmp_path / "ready").exists)
    yield launcher
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(30)


def test_status_shows_the_running_job_and_says_when_it_has_ended(
    tmp_path: Path, running: "subprocess.Popen[bytes]"
) -> None:
    done = evergrad("status", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 0 (of 1)  step 3/10" in done.stdout
    assert "standing in" in done.stdout
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 143
    done = evergrad("status", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has ended with exit status 143" in done.stderr


def test_status_of_another_job_at_the_same_address_says_so(tmp_path: Path, running: "subprocess.Popen[bytes]") -> None:
    address = (tmp_path / "logs" / "latest" / "job.json").read_text().split('"master": "')[1].split('"')[0]
    done = evergrad("status", "--master", address, "--job", "another", cwd=tmp_path)
    assert done.returncode == 2
    assert "no job another is running" in done.stderr


def test_status_of_a_job_whose_launcher_was_killed_says_that_nobody_answers(
    tmp_path: Path, running: "subprocess.Popen[bytes]", eventually: Callable[..., None]
) -> None:
    running.kill()
    running.wait()
    eventually(lambda: "no job is running: nobody answers" in evergrad("status", cwd=tmp_path).stderr)
