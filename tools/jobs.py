"""Whole jobs of real processes, as tests, tools and benchmarks start, watch and hurt them.

Whatever was started is ended by `close`, by its pid; the leak check of every test sees that nothing is left.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

from evergrad.errors import ConfigError
from evergrad.launch.jobfile import JobFile, read_latest
from evergrad.launch.processes import PARENT_PID
from evergrad.messages import Address, AskStatus, MemberStatus, Request, Role, Send, Status
from evergrad.wire.transport import Network, new_member

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
TRAIN, COUNT, FILMS = SCRIPTS / "train.py", SCRIPTS / "count.py", SCRIPTS / "films.py"
OF_A_JOB = {PARENT_PID, "EVERGRAD_MASTER", "EVERGRAD_JOB", "EVERGRAD_NAME", "EVERGRAD_SEED"}
"""What a job puts into the environment of its processes."""
WITHIN_S = 60.0
POLL_S = 0.02
T = TypeVar("T")
Alone = Callable[..., dict[str, str]]
"""Digests of the model that one process alone makes of a seed, with `train.py` or the script given."""


class Unmet(AssertionError):
    """Something that was waited for did not come."""


def until(probe: Callable[[], T | None], what: str, within_s: float = WITHIN_S) -> T:
    """Wait until `probe` returns something true, and return it."""
    end_s = time.monotonic() + within_s
    while not (found := probe()):
        if time.monotonic() > end_s:
            raise Unmet(f"not within {within_s:.0f} s: {what}")
        time.sleep(POLL_S)
    return found


def environment() -> dict[str, str]:
    """Ours, without what a job has put into it."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def python(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end."""
    argv = [sys.executable, *map(str, args)]
    return subprocess.run(argv, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=WITHIN_S)


def digests(model: Path) -> dict[str, str]:
    """The SHA-256 of each file of a saved model, by its path inside."""
    files = sorted(p for p in model.rglob("*") if p.is_file())
    return {str(p.relative_to(model)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Running:
    """A process that we have started; all that it writes goes to `log`."""

    def __init__(self, argv: Sequence[object], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self._popen = subprocess.Popen(
                [*map(str, argv)], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment()
            )
        self.pid = self._popen.pid

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._popen.send_signal(number)

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Its exit status."""
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise Unmet(f"{self.log.stem} did not end within {within_s:.0f} s:\n{self.text}") from None

    def kill(self) -> None:
        """End it now."""
        self._popen.kill()
        self._popen.wait()


class Shown(Running):
    """A process whose output is shown too, indented."""

    def __init__(self, argv: Sequence[object], log: Path) -> None:
        super().__init__(argv, log)
        self._reader = threading.Thread(target=self._show)
        self._reader.start()

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Its exit status, after all output was shown."""
        status = super().wait(within_s)
        self._reader.join()
        return status

    def kill(self) -> None:
        """End it now."""
        super().kill()
        self._reader.join()

    def _show(self) -> None:
        with self.log.open() as lines:
            is_over = False
            while not is_over:
                is_over = not self.is_alive
                for line in lines:
                    print(f"     {line.rstrip()}", flush=True)
                time.sleep(POLL_S)


class Job:
    """What jobs have in common, however they were started: a master that can be asked."""

    process: type[Running] = Running

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Running] = []
        self._network: Network | None = None
        self._requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def found(self) -> tuple[str, Address] | None:
        """The job's name and its master's address, once they are known."""
        raise NotImplementedError

    def status(self) -> Status:
        """How the job goes, as its master says."""
        name, address = until(self.found, "the job's address")
        if self._network is None:
            self._network = Network(name, new_member("watch"))
        self._requests += 1
        request, end_s = Request(self._requests), time.monotonic() + WITHIN_S
        while time.monotonic() < end_s:
            for _, answer in self._network.exchange([Send(address, AskStatus(request))], 1.0):
                if isinstance(answer, Status) and answer.request == request:
                    return answer
        raise Unmet("the master does not answer")

    def until(self, condition: Callable[[Status], object], what: str, within_s: float = WITHIN_S) -> Status:
        """Wait until the status is so, and return it."""

        def probe() -> Status | None:
            status = self.status()
            return status if condition(status) else None

        return until(probe, what, within_s)

    def gone(self, pid: int) -> Status:
        """The first status without the trainer of this pid; the job must still be under way."""
        status = self.until(lambda s: pid not in trainers(s), f"trainer {pid} to be missed")
        assert not status.ended
        return status

    def start(self, name: str, *argv: object) -> Running:
        """Start a process of this job's."""
        running = self.process([sys.executable, *argv], self.folder / f"{name}.out")
        self.processes.append(running)
        return running

    def close(self) -> None:
        """End what is left of it."""
        if self._network is not None:
            self._network.close()
        family = [p for running in self.processes for p in _family(running)]
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for running in self.processes:
            running.kill()


class Launched(Job):
    """A job started by `evergrad run`."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        *args: object,
        pservers: int = 1,
        trainers: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        self._script, self._args = script, args
        self.logs = folder / "logs"
        sizes = ("--pservers", pservers, "--trainers", trainers, "--log-dir", self.logs)
        self.launcher = self.start("launcher", "-m", "evergrad", "run", *sizes, *options, script, *args)

    @property
    def text(self) -> str:
        """What the console shows."""
        return self.launcher.text

    def found(self) -> tuple[str, Address] | None:
        """From the job's file."""
        if not self.launcher.is_alive:
            raise Unmet(f"the launcher has ended:\n{self.text}")
        file = self._file()
        return (file.job, file.master) if file else None

    def join(self, *more: object, name: str = "joiner") -> Running:
        """Add a trainer, as a user does by hand."""
        return self.start(name, "-m", "evergrad", "trainer", "--log-dir", self.logs, self._script, *self._args, *more)

    def family(self) -> list[psutil.Process]:
        """All processes of the launcher."""
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def members(self) -> dict[str, psutil.Process]:
        """The master, pservers and trainers that the launcher has started, by name."""
        found = {}
        for process in self.family():
            with suppress(psutil.Error):
                argv = process.cmdline()
                if "evergrad.master" in argv:
                    found["master"] = process
                elif "--name" in argv:
                    found[argv[argv.index("--name") + 1]] = process
        return found

    def hit(self, *names: str) -> dict[str, int]:
        """Kill processes of the job, these or all, at once; returns their pids by name."""
        there = until(lambda: self._all_of(names), f"{names or 'all'} to be there")
        for process in there.values():
            process.kill()
        return {name: process.pid for name, process in there.items()}

    def _all_of(self, names: Sequence[str]) -> dict[str, psutil.Process] | None:
        members = self.members()
        wanted = names or members
        return {name: members[name] for name in wanted} if all(name in members for name in wanted) else None

    def kill(self) -> None:
        """Kill the launcher and everything it has started."""
        family = self.family()
        self.launcher.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: not any(map(runs, family)), "all to be gone")

    def log(self, name: str) -> str:
        """The log of a role."""
        return (self.logs / "latest" / f"{name}.log").read_text()

    def wait(self) -> int:
        """The launcher's exit status; nothing that it started may be left by then."""
        return self.launcher.wait()

    def close(self) -> None:
        """Let the launcher clean up first: it is asked to, then, where it takes long, to do so at once."""
        for _ in range(2):
            if self.launcher.is_alive:
                self.launcher.send(signal.SIGTERM)
                with contextlib.suppress(Unmet):
                    self.launcher.wait(20.0)
        if self.launcher.is_alive:
            print(f"the launcher had to be killed:\n{self.text}")
        super().close()

    def _file(self) -> JobFile | None:
        try:
            return read_latest(self.logs)
        except ConfigError:
            return None


class ByHand(Job):
    """A job whose processes are started one by one."""

    def __init__(self, folder: Path, *, pservers: int = 1, lease_s: float = 5.0) -> None:
        super().__init__(folder)
        self.name = f"by-hand-{os.getpid()}"
        address = folder / "address"
        me = ("--job", self.name, "--pservers", pservers, "--lease", lease_s, "--address-file", address)
        self.master = self.start("master", "-m", "evergrad.master", *me)
        until(address.exists, "the master to listen")
        self.address = Address(address.read_text())
        self.pservers = [
            self.start(f"pserver-{place}", "-m", "evergrad.pserver", *self.joining(), "--place", place)
            for place in range(pservers)
        ]

    def found(self) -> tuple[str, Address] | None:
        """Known from the start."""
        return self.name, self.address

    def joining(self) -> tuple[str, ...]:
        """The options with which a process joins."""
        return "--master", self.address, "--job", self.name

    def trainer(self, name: str, script: Path, *args: object) -> Running:
        """Start a trainer."""
        return self.start(name, "-m", "evergrad.trainer", *self.joining(), "--name", name, script, *args)

    def wait(self, *others: Running) -> list[int]:
        """The exit statuses of master and pservers, then of others, when they have left by themselves."""
        return [running.wait() for running in (self.master, *self.pservers, *others)]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def trainers(status: Status) -> dict[int, MemberStatus]:
    """The trainers by pid."""
    return {m.pid: m for m in status.members if m.role is Role.TRAINER}


def at_work(status: Status, epoch: int = 0) -> list[int]:
    """The pids of the trainers that hold a task of this epoch."""
    return sorted(pid for pid, m in trainers(status).items() if m.doing.startswith(f"epoch {epoch}"))


def is_inside(status: Status, first: int = 0, epoch: int | None = None) -> bool:
    """Whether an epoch (this one) is under way and at step `first` or later."""
    right = epoch is None or status.epoch == epoch
    return right and status.phase == "training" and first <= status.step < status.steps


def reached(file: Path) -> set[int]:
    """The pids of the trainers that have come to where the script waits for `file`."""
    return {int(p.suffix[1:]) for p in file.parent.glob(f"{file.name}.*") if p.suffix[1:].isdigit()}


def _family(running: Running) -> list[psutil.Process]:
    if not running.is_alive:
        return []
    return psutil.Process(running.pid).children(recursive=True)
