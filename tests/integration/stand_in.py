"""Programs that stand where the roles stand, so that the launcher can be tested by itself.

    stand_in.py launch FOLDER [--pservers N] ...   run a job of stand-ins through the launcher
    stand_in.py master|pserver|trainer FOLDER ...  what the launcher starts; FOLDER holds what they tell each other
    stand_in.py standby FOLDER                     becomes a trainer when it is told its options

The master ends the job when FOLDER/end exists (its text is the failure) or when it is told to, and writes what it was
told to FOLDER/told. A trainer runs its script, which finds FOLDER, its name and its options as `folder`, `name` and
`argv`.
"""

import argparse
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from evergrad.launch.commands import Plan, Programs
from evergrad.launch.processes import PARENT_PID
from evergrad.launch.run import run
from evergrad.messages import AskStatus, Exited, MemberStatus, Noted, Role, Send, Status, StopJob
from evergrad.wire.transport import Listener

LINGER_S = 0.7


def launch(folder: Path, args: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pservers", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=10)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--refuse", default="")
    parser.add_argument("script")
    options = parser.parse_args(args)
    me = (sys.executable, __file__)

    def program(role: str) -> tuple[str, ...]:
        return (*me, "refuse" if role == options.refuse else role, str(folder))

    programs = Programs(*(program(role) for role in ("master", "pserver", "trainer", "warm", "standby")))
    plan = Plan(
        script=options.script,
        pservers=options.pservers,
        trainers=options.trainers,
        seed=options.seed,
        max_restarts=options.max_restarts,
        standby=options.standby,
        log_dir=folder / "logs",
    )
    return run(plan, programs)


class Master:
    def __init__(self, folder: Path, args: list[str]) -> None:
        parser = argparse.ArgumentParser()
        for option in ("--listen", "--job", "--pservers", "--address-file", "--store", "--scratch", "--resume"):
            parser.add_argument(option, required=True)
        options = parser.parse_args(args)
        self.folder, self.job = folder, options.job
        self.failure: str | None = None
        self.ended = False
        self.network = Listener(options.job, "master.1", options.listen)
        Path(f"{options.address_file}.new").write_text(self.network.address)
        Path(f"{options.address_file}.new").rename(options.address_file)

    def serve(self) -> int:
        until = float("inf")
        while time.monotonic() < until:
            for who, message in self.network.exchange([], 0.02):
                self.network.send([Send(who, self.answer(message))])
            if (end := self.folder / "end").exists() and not self.ended:
                self.ended, self.failure = True, end.read_text() or None
            if self.ended and until == float("inf"):
                until = time.monotonic() + LINGER_S
                (self.folder / "over").touch()
        self.network.close()
        return 1 if self.failure else 0

    def answer(self, message: object) -> Noted | Status:
        match message:
            case AskStatus(request):
                return self.status(request)
            case StopJob(request, failure, _):
                self.note(f"stop {failure}")
                self.ended, self.failure = True, failure
            case Exited(request, name, pid):
                self.note(f"exited {name} {pid}")
        return Noted(message.request)  # type: ignore[attr-defined]

    def note(self, text: str) -> None:
        with (self.folder / "told").open("a") as told:
            told.write(text + "\n")

    def status(self, request: int) -> Status:
        members = (MemberStatus("master", Role.MASTER, os.getpid(), 0.0, "standing in"),)
        counters, live = {"repeated": 1}, {"loss": 0.5}
        return Status(
            request, self.job, "training", "", 0, 1, 3, 10, 3, 96, 32.0, live, {0: {"auc": 0.75}}, members, counters,
            (), self.ended, self.failure,
        )  # fmt: skip


def pserver(folder: Path, args: list[str]) -> int:
    (folder / f"{args[args.index('--name') + 1]}.pid").write_text(str(os.getpid()))
    wait_for(folder / "over")
    return 0


def trainer(folder: Path, args: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
    name = args[args.index("--name") + 1]
    script = next(i for i, arg in enumerate(args) if arg.endswith(".py"))
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    runpy.run_path(args[script], {"folder": folder, "name": name, "argv": args}, "__main__")
    wait_for(folder / "over")
    return 0


def standby(folder: Path) -> int:
    with (folder / "standbys").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    line = sys.stdin.readline()
    return trainer(folder, json.loads(line)) if line else 0


def wait_for(path: Path) -> None:
    while not path.exists():
        threading.Event().wait(0.02)


def leave_with(parent: int) -> None:
    """End this process when its parent is gone, as the roles do."""
    while os.getppid() == parent:
        threading.Event().wait(0.05)
    os._exit(1)


def main() -> int:
    what, folder, args = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if what != "launch":
        threading.Thread(target=leave_with, args=(int(os.environ[PARENT_PID]),), daemon=True).start()
    match what:
        case "launch":
            return launch(folder, args)
        case "master":
            return Master(folder, args).serve()
        case "pserver":
            return pserver(folder, args)
        case "trainer":
            return trainer(folder, args)
        case "standby":
            return standby(folder)
        case "refuse":
            print("the port is taken; choose another", file=sys.stderr)
            return 2
        case _:
            return 0


if __name__ == "__main__":
    sys.exit(main())
