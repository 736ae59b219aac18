"""`evergrad run`: the loop that starts a job's processes, keeps them going and ends them all."""

import os
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from evergrad.errors import ConfigError
from evergrad.launch import decide, jobfile, view
from evergrad.launch.commands import Commands, Plan, Programs
from evergrad.launch.console import Console, console
from evergrad.launch.jobfile import JobFile
from evergrad.launch.link import MasterLink
from evergrad.launch.processes import Command, Process
from evergrad.launch.signals import Signals
from evergrad.launch.standby import Standby
from evergrad.messages import GRACE_S, Address, Exited, Role, Status, StopJob
from evergrad.wire.transport import Network, new_member

TICK_S = 0.05
WARM_WITHIN_S = 600.0
MASTER_WITHIN_S = 60.0
CONFIRM_WITHIN_S = 15.0
ENDING_WITHIN_S = 30.0
ORPHANED_WITHIN_S = 10.0
"""How long the others may take to leave by themselves when the master has ended the job and left."""
ABANDONED_WITHIN_S = 2.0
"""The same when the master is lost, so that no one can tell them."""
LEAVING_WITHIN_S = 10.0
STOPPING_WITHIN_S = 10.0
TERMINATING_WITHIN_S = 5.0
LAST_BYTES = 4096


class Phase(StrEnum):
    """How far the job has come, as the launcher sees it; it only moves downwards."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    """A signal came: the trainers have been asked to leave."""
    STOPPING = "stopping"
    """The master has been told to end the job."""
    ENDING = "ending"
    """The job is over; the processes are about to leave by themselves."""
    TERMINATING = "terminating"
    """Those that are left have been asked to leave."""
    KILLING = "killing"


def run(plan: Plan, programs: Programs | None = None) -> int:
    """Run a job to its end; returns its exit status. Every process it has started is gone by then.

    Raises:
        ConfigError: the script or the log folder cannot be used.
    """
    if not Path(plan.script).is_file():
        raise ConfigError(f"there is no script {plan.script!r}; give the path of a Python file")
    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    commands = Commands(plan, job, _make_folder(plan.log_dir / job), programs or Programs())
    with Signals() as signals:
        shown = console()
        try:
            launcher = Launcher(commands, shown, signals)
            ending = launcher.run()
        finally:
            shown.close()
        for line in view.summary(launcher.status, ending):
            shown.line(line)
    if ending.exit_status == 0:
        for folder in (commands.scratch, commands.record):
            shutil.rmtree(folder, ignore_errors=True)
    return ending.exit_status


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except OSError as exc:
        raise ConfigError(f"cannot make the log folder {folder}: {exc.strerror}; choose another --log-dir") from exc
    return folder


class Launcher:
    """One job's processes.

    Invariants:
        1. `_processes` and `_standby` hold every process started and not yet reaped: none when `run` returns or raises.
        2. `_outcome` is set once and never changed: the first cause is the one reported.
    """

    def __init__(self, commands: Commands, shown: Console, signals: Signals) -> None:
        self._commands = commands
        self._console = shown
        self._signals = signals
        self._began = time.monotonic()
        self._processes: dict[str, Process] = {}
        self._due: dict[str, tuple[float, Command]] = {}
        self._confirm_by: dict[str, float] = {}
        self._restarts: defaultdict[str, list[float]] = defaultdict(list)
        self._uncounted: set[str] = set()
        self._standby = Standby(commands.standby(), self._started) if commands.plan.standby else None
        self._link: MasterLink | None = None
        self._phase = Phase.STARTING
        self._deadline = float("inf")
        self._outcome: decide.Finish | None = None

    @property
    def status(self) -> Status | None:
        """The job as the master last described it."""
        return self._link.status if self._link else None

    def run(self) -> view.Ending:
        """Start everything, see the job to its end, and leave nothing behind."""
        try:
            self._start()
            while self._processes or self._due:
                self._turn()
        finally:
            self._kill_all()
            if self._link:
                self._link.close()
        return self._end()

    # -- the start -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._console.line(f"job {self._commands.job}: logs in {self._commands.folder}")
        if not (self._warm() and (address := self._start_master())):
            return
        plan = self._commands.plan
        self._link = MasterLink(Network(self._commands.job, new_member("launcher")), address)
        self._write_job(self._job(address))
        jobfile.make_latest(self._commands.folder)
        for place in range(plan.pservers):
            self._start_process(self._commands.pserver(place, address))
        for index in range(plan.trainers):
            self._start_process(self._commands.trainer(index, address))
        if self._phase is Phase.STARTING:
            self._enter(Phase.RUNNING, float("inf"))

    def _warm(self) -> bool:
        command = self._commands.warm()
        self._start_process(command)
        self._wait(lambda: command.name not in self._processes, WARM_WITHIN_S, "compiling the kernels")
        return self._outcome is None

    def _start_master(self) -> Address | None:
        file = self._commands.folder / ".address"
        self._start_process(self._commands.master(file))
        self._wait(file.exists, MASTER_WITHIN_S, "starting the master")
        if self._outcome is not None:
            return None
        address = Address(file.read_text().strip())
        file.unlink()
        return address

    def _wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition() and self._outcome is None:
            if time.monotonic() >= deadline:
                self._finish(decide.FAILED, f"{what} took longer than {within_s:.0f} s")
            self._turn()

    def _start_process(self, command: Command) -> None:
        ready = self._standby.become(command) if self._standby and command.told else None
        self._processes[command.name] = ready or self._started(command)

    def _started(self, command: Command) -> Process:
        return Process(command, lambda name, line: self._console.line(f"{name} | {line}"))

    def _job(self, address: Address) -> JobFile:
        plan = self._commands.plan
        script = str(Path(plan.script).resolve())
        return JobFile(
            self._commands.job, address, os.getpid(), script, plan.args, plan.pservers, plan.trainers, plan.seed
        )

    def _write_job(self, job: JobFile) -> None:
        self._jobfile = job
        jobfile.write(self._commands.folder, job)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.monotonic()
        while (number := self._signals.take()) is not None:
            self._on_signal(number, now)
        self._reap(now)
        self._start_due(now)
        self._keep_ready(now)
        self._talk(now)
        self._confirm(now)
        self._press(now)

    def _talk(self, now: float) -> None:
        if self._link is None:
            time.sleep(TICK_S)
            return
        known = self._link.status
        self._link.turn(now, TICK_S)
        status = self._link.status
        if status is None or status is known:
            return
        self._console.show(status, self._restart_counts(), now)
        if status.ended and self._phase is Phase.RUNNING:
            self._due.clear()
            self._outcome = decide.Finish(decide.FAILED if status.failure else 0, status.failure)
            self._enter(Phase.ENDING, now + ENDING_WITHIN_S)

    def _on_signal(self, number: int, now: float) -> None:
        if self._phase not in (Phase.RUNNING, Phase.ENDING):
            self._outcome = self._outcome or decide.Finish(128 + number, None)
            self._enter(Phase.KILLING, now)
            return
        self._console.line(f"{signal.Signals(number).name}: stopping the job; again to kill it at once")
        self._outcome = self._outcome or decide.Finish(128 + number, None)
        self._due.clear()
        for process in self._of(Role.TRAINER):
            process.terminate()
        self._enter(Phase.LEAVING, now + LEAVING_WITHIN_S)

    def _reap(self, now: float) -> None:
        for name, process in list(self._processes.items()):
            status = process.reap()
            if status is not None:
                del self._processes[name]
                self._on_end(process, status, now)

    def _on_end(self, process: Process, status: int, now: float) -> None:
        command = process.command
        if command.waits:
            return
        if command.role is Role.LAUNCHER:
            if status:
                self._finish(decide.FAILED, f"the kernels could not be compiled; see {command.log}")
            return
        if command.role in (Role.TRAINER, Role.PSERVER) and self._link:
            self._link.tell(lambda request: Exited(request, command.name, process.pid))
        if self._phase in (Phase.STARTING, Phase.RUNNING):
            self._act(process, status, now)
        elif command.role is Role.TRAINER and status == decide.MISTAKE and not self._restarts[command.name]:
            if self._outcome is None or self._outcome.status == 0:  # the others were done before this one was heard
                self._outcome = decide.Finish(decide.MISTAKE, self._reason(process, decide.MISTAKE, None))
        elif command.role is Role.MASTER and self._phase in (Phase.STOPPING, Phase.ENDING):
            self._deadline = min(self._deadline, now + ORPHANED_WITHIN_S)

    def _act(self, process: Process, status: int, now: float) -> None:
        name = process.command.name
        match decide.decide(self._facts(process.command, status, now)):
            case decide.Restart(after_s, reason):
                self._console.line(f"{name} (pid {process.pid}) {reason}")
                self._due[name] = (now + after_s, self._next(process.command))
                if status == decide.RAISED:
                    self._uncounted.add(name)
            case decide.LetGo(reason):
                self._console.line(f"{name} (pid {process.pid}) {reason}")
            case decide.Confirm():
                self._confirm_by[name] = now + CONFIRM_WITHIN_S
            case decide.Finish(code, reason):
                self._finish(code, self._reason(process, code, reason))

    def _next(self, command: Command) -> Command:
        """What to start in place of a process."""
        if command.role is Role.MASTER and self._link:
            return self._commands.master(self._commands.folder / ".address", self._jobfile.master)
        return command

    def _facts(self, command: Command, status: int, now: float) -> decide.End:
        return decide.End(
            role=command.role,
            status=status,
            restarts_s=tuple(now - at for at in self._restarts[command.name]),
            max_restarts=self._commands.plan.max_restarts,
            others=self._other_trainers(now),
        )

    def _other_trainers(self, now: float) -> int:
        """The trainers that run or soon will, also those that were added by hand."""
        soon = [at for at, _ in self._due.values() if at <= now + decide.LONGEST_BACKOFF_S]
        ours = {self._commands.trainer_name(index) for index in range(self._commands.plan.trainers)}
        members = self.status.members if self.status else ()
        added = [m for m in members if m.role is Role.TRAINER and m.name not in ours]
        return len(self._of(Role.TRAINER)) + len(soon) + len(added)

    def _restart_counts(self) -> dict[str, int]:
        return {name: len(times) for name, times in self._restarts.items() if times}

    def _reason(self, process: Process, code: int, reason: str | None) -> str | None:
        command = process.command
        if code == 0:
            return None
        if code == decide.MISTAKE:
            return _last_words(command.log) or f"{command.name} refused to start; see {command.log}"
        what = reason or f"failed ({_last_words(command.log) or 'without a word'})"
        return f"{command.name} (pid {process.pid}) {what}; see {command.log}"

    def _start_due(self, now: float) -> None:
        for name, (at, command) in list(self._due.items()):
            if now >= at:
                del self._due[name]
                if name in self._uncounted:
                    self._uncounted.remove(name)
                else:
                    self._restarts[name].append(now)
                self._start_process(command)

    def _keep_ready(self, now: float) -> None:
        """Once training has begun, so that the start is not slowed down, a process for the trainer that dies next."""
        if self._standby and self._phase is Phase.RUNNING and self.status and self.status.epoch >= 0:
            self._standby.turn(now)

    def _confirm(self, now: float) -> None:
        if self._phase is not Phase.RUNNING:
            return
        for name, by in self._confirm_by.items():
            if now >= by:
                self._finish(decide.FAILED, f"{name} has left, and the master does not say that the job is over")
                return

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str | None) -> None:
        """End the job: well if the master has said so by leaving, or else by telling it."""
        now = time.monotonic()
        self._outcome = self._outcome or decide.Finish(code, reason)
        self._due.clear()
        if "master" in self._processes and self._link:
            self._stop_master(reason, now)
        else:
            self._enter(Phase.ENDING, now + (ABANDONED_WITHIN_S if code else ORPHANED_WITHIN_S))

    def _stop_master(self, failure: str | None, now: float, grace_s: float | None = None) -> None:
        if self._link:
            self._link.tell(lambda request: StopJob(request, failure, grace_s))
        self._enter(Phase.STOPPING, now + STOPPING_WITHIN_S + (grace_s or 0.0))

    def _press(self, now: float) -> None:
        """Go on to sterner means when the time for the present ones is over."""
        if self._phase is Phase.LEAVING and (now >= self._deadline or not self._of(Role.TRAINER)):
            for process in self._of(Role.TRAINER):
                process.kill()
            self._stop_master("it was stopped by a signal", now, GRACE_S)
        elif self._is_master_alone():
            self._processes["master"].terminate()  # it has stayed for the others
            self._enter(Phase.TERMINATING, now + TERMINATING_WITHIN_S)
        elif self._phase in (Phase.STOPPING, Phase.ENDING) and now >= self._deadline:
            for name, process in self._processes.items():
                self._console.line(f"{name} (pid {process.pid}) has not left by itself and is asked to")
                process.terminate()
            self._enter(Phase.TERMINATING, now + TERMINATING_WITHIN_S)
        elif self._phase is Phase.KILLING or (self._phase is Phase.TERMINATING and now >= self._deadline):
            for process in self._processes.values():
                process.kill()

    def _is_master_alone(self) -> bool:
        """Whether the job is over and only the master is left, which stays for others until it is told to go."""
        is_told = self._phase is Phase.ENDING or (
            self._phase is Phase.STOPPING and self._link and self._link.is_all_told
        )
        return bool(is_told) and list(self._processes) == ["master"]

    def _kill_all(self) -> None:
        self._end_standby()
        for process in self._processes.values():
            process.kill()
        while self._processes:
            self._processes = {n: p for n, p in self._processes.items() if p.reap() is None}
            time.sleep(TICK_S if self._processes else 0)

    def _end(self) -> view.Ending:
        outcome = self._outcome or decide.Finish(decide.FAILED, "the processes ended without a reason")
        if self._link:
            try:
                jobfile.write(self._commands.folder, msgspec.structs.replace(self._jobfile, status=outcome.status))
            except OSError as exc:
                self._console.line(f"the job's file in {self._commands.folder} could not be written: {exc.strerror}")
        said = self.status.failure if self.status else None
        return view.Ending(
            exit_status=outcome.status,
            wall_s=time.monotonic() - self._began,
            restarts=self._restart_counts(),
            failure=said or outcome.reason if 0 < outcome.status < 128 else None,
            folder=str(self._commands.folder),
        )

    def _of(self, role: Role) -> list[Process]:
        return [p for p in self._processes.values() if p.command.role is role]

    def _enter(self, phase: Phase, deadline: float) -> None:
        self._phase, self._deadline = phase, deadline
        if phase is not Phase.RUNNING:
            self._end_standby()

    def _end_standby(self) -> None:
        """From now on it is a process as any other, which is about to end."""
        if self._standby and (process := self._standby.close()):
            process.kill()
            self._processes["standby"] = process


def _last_words(log: Path) -> str:
    """The last line a process has written."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
