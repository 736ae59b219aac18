"""The launcher with real processes, in which small programs stand for the roles (`stand_in.py`)."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

STAND_IN = Path(__file__).with_name("stand_in.py")
GOOD = "print('hello from', name); (folder / 'end').write_text('')"
IDLE = "import threading; print('ready', flush=True); threading.Event().wait(60)"

Eventually = Callable[..., None]


class Job:
    """A launcher under way, with its folder."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        self.folder = folder
        (folder / "script.py").write_text(script)
        argv = [sys.executable, str(STAND_IN), "launch", str(folder), *options, str(folder / "script.py")]
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.popen = subprocess.Popen(
                argv, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def told(self) -> list[str]:
        path = self.folder / "told"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def logs(self) -> Path:
        return self.folder / "logs" / "latest"

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def wait(self) -> int:
        return self.popen.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(script: str, *options: str) -> Job:
        jobs.append(Job(tmp_path, script, *options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.popen.kill()
        job.popen.wait()


Start = Callable[..., Job]


def test_a_job_that_ends_well_ends_with_status_0_and_a_summary(start: Start) -> None:
    job = start(GOOD, "--pservers", "2", "--trainers", "2")
    assert job.wait() == 0, job.text
    assert "trainer-0 | hello from trainer-0" in job.text
    assert "The job ended well." in job.text
    assert "epoch 0: auc 0.7500" in job.text
    assert "counted: repeated 1" in job.text


def test_each_process_has_its_log_and_the_job_its_file(start: Start) -> None:
    job = start(GOOD, "--pservers", "2", "--seed", "7")
    assert job.wait() == 0, job.text
    logs = {p.name for p in job.logs.iterdir()}
    assert logs == {"job.json", "kernels.log", "master.log", "pserver-0.log", "pserver-1.log", "trainer-0.log"}
    assert (job.logs / "trainer-0.log").read_text() == "hello from trainer-0\n"
    file = json.loads((job.logs / "job.json").read_text())
    assert (file["pservers"], file["trainers"], file["seed"], file["status"]) == (2, 1, 7, 0)


def test_a_trainer_that_is_killed_is_started_again_and_the_master_is_told(start: Start) -> None:
    script = f"""
import os, signal
once = folder / 'once'
if not once.exists():
    once.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
{GOOD}
"""
    job = start(script)
    assert job.wait() == 0, job.text
    pid = (job.folder / "once").read_text()
    assert f"trainer-0 (pid {pid}) was killed by SIGKILL; it starts again now" in job.text
    assert f"exited trainer-0 {pid}" in job.told
    assert "restarts: trainer-0 1x" in job.text


def test_a_process_kept_ready_takes_the_place_of_a_trainer_that_died(start: Start, eventually: Eventually) -> None:
    job = start("import os; print('here', os.getpid(), flush=True)\n" + IDLE, "--trainers", "2", "--standby")
    standbys = job.folder / "standbys"
    eventually(lambda: "trainer-1 | here" in job.text)
    for number in range(2):
        eventually(lambda n=number: standbys.exists() and len(standbys.read_text().split()) == n + 1)
        ready, old = standbys.read_text().split()[number], job.pid("trainer-1")
        os.kill(old, signal.SIGKILL)
        eventually(lambda r=ready: f"trainer-1 | here {r}\n" in job.text)
        eventually(lambda o=old: f"exited trainer-1 {o}" in job.told)
    assert (job.logs / "trainer-1.log").read_text().count("here") == 3
    (job.folder / "end").touch()
    assert job.wait() == 0, job.text
    assert "restarts: trainer-1 2x" in job.text


def test_a_process_kept_ready_that_dies_ends_nothing_and_one_that_is_never_needed_is_ended(
    start: Start, eventually: Eventually
) -> None:
    job = start(IDLE, "--standby")
    standbys = job.folder / "standbys"
    eventually(lambda: "| ready" in job.text and standbys.exists() and standbys.read_text())
    (dead,) = map(int, standbys.read_text().split())
    os.kill(dead, signal.SIGKILL)
    os.kill(job.pid("trainer-0"), signal.SIGKILL)
    eventually(lambda: job.text.count("| ready") == 2)
    (job.folder / "end").touch()
    assert job.wait() == 0, job.text


def test_a_trainer_that_dies_again_and_again_ends_the_job(start: Start) -> None:
    job = start("import os; os._exit(9)", "--max-restarts", "1")
    assert job.wait() == 1
    assert "exited with status 9 and has been restarted 1 times within an hour; there is no other trainer" in job.text
    assert any(line.startswith("stop trainer-0") for line in job.told)


@pytest.mark.parametrize("victim", ["pserver-0", "master"])
def test_a_dead_pserver_or_master_that_may_not_be_restarted_ends_the_job_with_one_sentence(
    start: Start, eventually: Eventually, victim: str
) -> None:
    job = start(IDLE, "--max-restarts", "0")
    eventually(lambda: "ready" in job.text and (job.folder / "pserver-0.pid").exists())
    pid = job.pid(victim) if victim != "master" else next(p.pid for p in job.processes() if "master" in p.cmdline())
    os.kill(pid, signal.SIGKILL)
    assert job.wait() == 1
    sentence = f"{victim} (pid {pid}) was killed by SIGKILL; see "
    assert job.text.count(sentence) == 1
    assert f"{victim}.log" in job.text


@pytest.mark.parametrize("role", ["master", "pserver", "trainer"])
def test_a_mistake_that_a_role_finds_is_said_in_its_words_with_status_2(start: Start, role: str) -> None:
    job = start(IDLE, "--refuse", role)
    assert job.wait() == 2
    assert "the port is taken; choose another" in job.text
    assert "Traceback" not in job.text


def test_kernels_that_cannot_be_compiled_end_the_job(start: Start) -> None:
    job = start(IDLE, "--refuse", "warm")
    assert job.wait() == 1
    assert "the kernels could not be compiled; see" in job.text


def test_a_failure_the_master_knows_is_the_reason_given(start: Start) -> None:
    job = start("(folder / 'end').write_text('ValueError: no such column')")
    assert job.wait() == 1
    assert job.text.count("ValueError: no such column") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_trainers_leave_before_the_job_is_stopped(
    start: Start, eventually: Eventually, number: int, status: int
) -> None:
    job = start(IDLE, "--trainers", "2")
    eventually(lambda: job.text.count("ready") == 2)
    job.popen.send_signal(number)
    assert job.wait() == status
    assert [line.split()[0] for line in dict.fromkeys(job.told)] == ["exited", "exited", "stop"]
    assert "The job was stopped." in job.text


def test_a_second_signal_kills_at_once(start: Start, eventually: Eventually) -> None:
    job = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + IDLE)
    eventually(lambda: "ready" in job.text)
    job.popen.send_signal(signal.SIGINT)
    eventually(lambda: "again to kill it at once" in job.text)
    job.popen.send_signal(signal.SIGINT)
    assert job.popen.wait(5) == 130


def test_one_trainer_asked_to_leave_is_not_started_again(start: Start, eventually: Eventually) -> None:
    job = start(IDLE, "--trainers", "2")
    eventually(lambda: job.text.count("ready") == 2)
    os.kill(job.pid("trainer-1"), signal.SIGTERM)
    eventually(lambda: "was asked to leave and left" in job.text)
    (job.folder / "end").touch()
    job.popen.send_signal(signal.SIGTERM)
    job.wait()
    assert "starts again" not in job.text


def test_the_processes_of_a_launcher_that_is_killed_can_tell_by_their_parent(
    start: Start, eventually: Eventually
) -> None:
    job = start(IDLE)
    eventually(lambda: "ready" in job.text)
    family = job.processes()
    assert {p.environ()["EVERGRAD_PARENT_PID"] for p in family} == {str(job.popen.pid)}
    job.popen.kill()
    eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))


def test_a_missing_script_starts_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "evergrad", "run", "--log-dir", str(tmp_path / "logs"), str(tmp_path / "no.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_in_a_terminal_a_live_screen_shows_the_job_and_lines_scroll_above_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('[bold]plain[/bold]')\nimport threading; threading.Event().wait(1.2)\n{GOOD}")
    argv = [sys.executable, str(STAND_IN), "launch", str(tmp_path), str(script)]
    terminal, end = pty.openpty()
    with subprocess.Popen(argv, stdout=end, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}) as launcher:
        os.close(end)
        text = b"".join(until_closed(terminal)).decode()
        assert launcher.wait(30) == 0, text
    os.close(terminal)
    assert "trainer-0 | [bold]plain[/bold]" in text
    assert "standing in" in text
    assert "The job ended well." in text


def until_closed(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # how a terminal ends on Linux
        while chunk := os.read(terminal, 4096):
            yield chunk
