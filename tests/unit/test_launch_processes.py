"""Starting and ending processes, with small programs."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from evergrad.launch.processes import Command, Lines, Process
from evergrad.messages import Role

Eventually = Callable[..., None]


class Started:
    """A process running a small program, and the lines it wrote."""

    def __init__(self, folder: Path, program: str, *, echo: bool = True) -> None:
        self.lines: list[str] = []
        self.log = folder / "it.log"
        argv = (sys.executable, "-c", program)
        command = Command("it", Role.TRAINER, argv, self.log, echo)
        self.process = Process(command, lambda name, line: self.lines.append(f"{name} | {line}"))
        self.status: int | None = None

    def has_ended(self) -> bool:
        if self.status is None:
            self.status = self.process.reap()
        return self.status is not None


@pytest.mark.parametrize("echo", [True, False])
def test_all_that_a_process_writes_is_in_its_log(tmp_path: Path, eventually: Eventually, echo: bool) -> None:
    it = Started(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", echo=echo)
    eventually(it.has_ended)
    assert it.status == 7
    assert it.log.read_text() == "out\nerr\n"
    assert it.lines == (["it | out", "it | err"] if echo else [])


def test_a_process_started_again_goes_on_with_the_same_log(tmp_path: Path, eventually: Eventually) -> None:
    for _ in range(2):
        eventually(Started(tmp_path, "print('started')").has_ended)
    assert (tmp_path / "it.log").read_text() == "started\n" * 2


def test_a_signal_shows_as_a_negative_status(tmp_path: Path, eventually: Eventually) -> None:
    it = Started(tmp_path, "import time; print('ready'); time.sleep(60)")
    eventually(lambda: it.lines)
    it.process.terminate()
    eventually(it.has_ended)
    assert it.status == -signal.SIGTERM


def test_what_a_process_has_started_ends_with_it(tmp_path: Path, eventually: Eventually) -> None:
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    it = Started(tmp_path, child)
    eventually(it.has_ended)
    pid = int(it.lines[0].split()[-1])
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_process_knows_its_parent_and_does_not_hold_back_output(tmp_path: Path, eventually: Eventually) -> None:
    it = Started(tmp_path, "import os; print(os.environ['EVERGRAD_PARENT_PID'], os.environ['PYTHONUNBUFFERED'])")
    eventually(it.has_ended)
    assert it.lines == [f"it | {os.getpid()} 1"]


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Process(Command("it", Role.MASTER, ("/no/such/program",), tmp_path / "it.log", True), print)


def lines_of(*chunks: bytes) -> list[str]:
    shown: list[str] = []
    lines = Lines(shown.append)
    for chunk in chunks:
        lines.feed(chunk)
    lines.end()
    return shown


def test_lines_are_put_together_from_pieces() -> None:
    assert lines_of(b"on", b"e\ntw", b"o\n\nlast") == ["one", "two", "", "last"]


def test_of_a_line_that_overwrites_itself_the_end_is_shown() -> None:
    assert lines_of(b"1%\r50%\r100%\r\n") == ["100%"]


def test_bytes_that_are_no_text_do_not_stop_the_output() -> None:
    assert lines_of(b"\xff\xfe ok\n") == ["\ufffd\ufffd ok"]


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    shown: list[str] = []
    lines = Lines(shown.append)
    for _ in range(3):
        lines.feed(b"x" * 70_000)
    assert [len(s) for s in shown] == [70_000] * 3
