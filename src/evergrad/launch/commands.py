"""The command line of each process of a job: the contract between the launcher and the roles."""

import sys
from dataclasses import dataclass
from pathlib import Path

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
    max_failures: int | None = None


@dataclass(frozen=True, slots=True)
class Programs:
    """How each role and the compiler of kernels is started; its options follow."""

    master: tuple[str, ...] = (sys.executable, "-m", "evergrad.master")
    pserver: tuple[str, ...] = (sys.executable, "-m", "evergrad.pserver")
    trainer: tuple[str, ...] = (sys.executable, "-m", "evergrad.trainer")
    warm: tuple[str, ...] = (sys.executable, "-m", "evergrad.kernels.warm")


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

    def master(self, address_file: Path) -> Command:
        """The master, on a free port that it writes into `address_file`."""
        options = ("--listen", ANY_PORT, "--job", self.job, "--pservers", str(self.plan.pservers))
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
        argv = (*self.programs.trainer, *self._joining(master, name), *seed, self.plan.script, *self.plan.args)
        return self._command(name, Role.TRAINER, argv, echo=True)

    def trainer_name(self, index: int) -> str:
        """What people call the launcher's own trainers."""
        return f"trainer-{index}"

    def _joining(self, master: Address, name: str) -> tuple[str, ...]:
        return "--master", master, "--job", self.job, "--name", name

    def _command(self, name: str, role: Role, argv: tuple[str, ...], *, echo: bool) -> Command:
        return Command(name, role, argv, self.folder / f"{name}.log", echo)
