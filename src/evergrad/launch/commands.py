"""The command line of each process of a job: the contract between the launcher and the roles."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from evergrad.launch.processes import Command
from evergrad.messages import Address, Role

ANY_PORT = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `evergrad run` was asked for."""

    script: str
    args: tuple[str, ...] = ()
    pservers: int = 1
    trainers: int = 1
    memory: str | None = None
    seed: int | None = None
    log_dir: Path = Path("evergrad-logs")
    max_restarts: int = 10
    checkpoints: str | None = None
    resume: str = "auto"
    max_failures: int | None = None
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Programs:
    """How each role, the compiler of kernels and a trainer to be is started; its options follow."""

    master: tuple[str, ...] = (sys.executable, "-m", "evergrad.master")
    pserver: tuple[str, ...] = (sys.executable, "-m", "evergrad.pserver")
    trainer: tuple[str, ...] = (sys.executable, "-m", "evergrad.trainer")
    warm: tuple[str, ...] = (sys.executable, "-m", "evergrad.kernels.warm")
    standby: tuple[str, ...] = (sys.executable, "-m", "evergrad.job.standby")


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of one job, whose logs lie in `folder`."""

    plan: Plan
    job: str
    folder: Path
    programs: Programs = Programs()

    def warm(self) -> Command:
        """Compiles all kernels into the cache, so that no two processes do the same work."""
        return self._command("kernels", Role.LAUNCHER, self.programs.warm, echo=False)

    @property
    def record(self) -> Path:
        """The folder of the master's record."""
        return self.folder.resolve() / "record"

    @property
    def scratch(self) -> Path:
        """The folder of checkpoints that are made to fall back to, if nobody says where they go."""
        return self.folder.resolve() / "checkpoints"

    def master(self, address_file: Path, address: Address | None = None) -> Command:
        """The master, on a free port that it writes into `address_file`; the next one, at the address of the first."""
        plan = self.plan
        options: tuple[str, ...] = (
            "--listen", address or ANY_PORT, "--job", self.job, "--pservers", str(plan.pservers)
        )  # fmt: skip
        options += ("--store", str(self.record), "--scratch", str(self.scratch), "--resume", plan.resume)
        options += () if plan.checkpoints is None else ("--checkpoints", plan.checkpoints)
        failures = () if self.plan.max_failures is None else ("--max-failures", str(self.plan.max_failures))
        argv = (*self.programs.master, *options, *failures, "--address-file", str(address_file))
        return self._command("master", Role.MASTER, argv, echo=False)

    def pserver(self, place: int, master: Address) -> Command:
        """The pserver of a place."""
        name = f"pserver-{place}"
        memory = () if self.plan.memory is None else ("--memory", self.plan.memory)
        argv = (*self.programs.pserver, *self._joining(master, name), "--place", str(place), *memory)
        return self._command(name, Role.PSERVER, argv, echo=False)

    def trainer(self, index: int, master: Address) -> Command:
        """A trainer; what it prints is shown."""
        name = self.trainer_name(index)
        seed = () if self.plan.seed is None else ("--seed", str(self.plan.seed))
        options = (*self._joining(master, name), *seed, self.plan.script, *self.plan.args)
        command = self._command(name, Role.TRAINER, (*self.programs.trainer, *options), echo=True)
        return replace(command, told=msgspec.json.encode(options) + b"\n")

    def standby(self) -> Command:
        """A process that becomes any of the trainers when it is told."""
        return replace(self._command("standby", Role.TRAINER, self.programs.standby, echo=True), waits=True)

    def trainer_name(self, index: int) -> str:
        """What people call the launcher's own trainers."""
        return f"trainer-{index}"

    def _joining(self, master: Address, name: str) -> tuple[str, ...]:
        return "--master", master, "--job", self.job, "--name", name

    def _command(self, name: str, role: Role, argv: tuple[str, ...], *, echo: bool) -> Command:
        return Command(name, role, argv, self.folder / f"{name}.log", echo)
