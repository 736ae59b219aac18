"""The `evergrad` command."""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from evergrad import cli_checkpoints
from evergrad.checkpoint.storage import shared_url
from evergrad.errors import ConfigError, EvergradError
from evergrad.launch import jobfile, view
from evergrad.launch.ask import ask_status
from evergrad.launch.commands import ANY_PORT, Plan
from evergrad.launch.processes import PARENT_PID
from evergrad.launch.run import run as run_job
from evergrad.sizes import parse_bytes
from evergrad.version import VERSION

# Typer does not export the class of its errors, only one that inherits from it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
SCRIPT_ARGS = {"allow_interspersed_args": False}
"""What follows SCRIPT is the script's, options too."""

app = typer.Typer(
    name="evergrad",
    help="Evergrad: a fault-tolerant, elastic parameter server for PyTorch.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LogDir = Annotated[Path, typer.Option(help="Folder for the logs of jobs.", envvar="EVERGRAD_LOG_DIR")]
CheckpointsUrl = Annotated[
    str | None, typer.Option(help="Where checkpoints go, instead of where the script says: a folder or URL.")
]
Resume = Annotated[
    str, typer.Option(help='"auto": go on with the newest checkpoint; "never"; or the checkpoint to go on with.')
]
Master = Annotated[str | None, typer.Option(help="Address of the master, tcp://127.0.0.1:PORT.")]
JobName = Annotated[str | None, typer.Option(help="Name of the job.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the job, instead of the script's.")]
Memory = Annotated[str | None, typer.Option(help="What each pserver may use, as 512M or 8G; refused beyond it.")]
MaxFailures = Annotated[
    int | None,
    typer.Option(min=1, help="How often the script may raise in a task before it is set aside; 3 if not given."),
]
LOG_DIR = Path("evergrad-logs")


def main() -> None:
    """Run the command in `sys.argv` and exit with its status: 2 for a mistake of the user, 1 for a failure."""
    sys.exit(_main(sys.argv[1:]))


def _main(args: list[str]) -> int:
    try:
        status = app(args, prog_name="evergrad", standalone_mode=False)
    except _UsageError as exc:
        return _usage(exc)
    except ConfigError as exc:
        return _say(str(exc), 2)
    except EvergradError as exc:
        return _say(str(exc), 1)
    except typer.Abort:
        return 130
    return status if isinstance(status, int) else 0


def _usage(exc: Exception) -> int:
    message = getattr(exc, "format_message", exc.__str__)()
    if "\n" in message:  # no command at all: the message is the help
        print(message, file=sys.stderr)
        return 2
    context = getattr(exc, "ctx", None)
    command = context.command_path if context else "evergrad"
    return _say(f"{message.rstrip('.')}; see '{command} --help'", 2)


def _say(sentence: str, status: int) -> int:
    if sentence:
        print(f"evergrad: {sentence}", file=sys.stderr)
    return status


def _version(asked: bool) -> None:
    if asked:
        print(f"evergrad {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models on parameter servers, through failures, with the same result.

    \b
    Example:
      evergrad run --pservers 2 --trainers 4 train.py
    """


@app.command(context_settings=SCRIPT_ARGS)
def run(
    script: Annotated[str, typer.Argument(help="The training script.", metavar="SCRIPT")],
    args: Annotated[list[str] | None, typer.Argument(help="Passed to the script.", metavar="ARGS")] = None,
    pservers: Annotated[int, typer.Option(min=1, help="Number of pservers.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Number of trainers.")] = 1,
    seed: Seed = None,
    log_dir: LogDir = LOG_DIR,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often an hour each trainer is started again.")] = 10,
    max_failures: MaxFailures = None,
    standby: Annotated[bool, typer.Option(help="Keep a process ready for the trainer that dies next.")] = False,
    memory: Memory = None,
    checkpoints: CheckpointsUrl = None,
    resume: Resume = "auto",
) -> int:
    """Run a script as a job of processes on this machine.

    Shows progress, starts processes that die again, writes one log per process, and ends with the job's exit status.
    A task in which the script raises is tried again by others, then set aside: the job goes on, and fails in the end.

    \b
    Example:
      evergrad run --pservers 2 --trainers 4 --memory 8G train.py --epochs 5
    """
    if memory is not None:
        parse_bytes(memory)
    plan = Plan(
        script=script,
        args=tuple(args or ()),
        pservers=pservers,
        trainers=trainers,
        seed=seed,
        log_dir=log_dir,
        max_restarts=max_restarts,
        max_failures=max_failures,
        standby=standby,
        memory=memory,
        checkpoints=None if checkpoints is None else shared_url(checkpoints),
        resume=_resumed(resume),
    )
    return run_job(plan)


def _resumed(resume: str) -> str:
    return resume if resume in ("auto", "never") else shared_url(resume)


@app.command()
def status(log_dir: LogDir = LOG_DIR, master: Master = None, job: JobName = None) -> None:
    """Show how the running job goes.

    \b
    Example:
      evergrad status
      evergrad status --master tcp://127.0.0.1:7000 --job 20250101-120000-ab12
    """
    job, master = _find(log_dir, master, job)
    Console(highlight=False, markup=False, emoji=False).print(view.screen(ask_status(job, master), {}, is_stalled=True))


def _find(log_dir: Path, master: str | None, job: str | None) -> tuple[str, str]:
    """The job's name and its master's address, from the options or from the newest job's file."""
    if master and job:
        return job, master
    if master or job:
        raise ConfigError("--master and --job belong together; give both, or neither to find the job in --log-dir")
    found = jobfile.read_latest(log_dir)
    return found.job, found.master


@app.command()
def master(
    job: Annotated[str, typer.Option(help="Name of the job, the same for all its processes.")],
    pservers: Annotated[int, typer.Option(min=1, help="Number of pservers the job has.")] = 1,
    listen: Annotated[str, typer.Option(help="Address to listen on; port 0 takes a free one.")] = ANY_PORT,
    address_file: Annotated[Path | None, typer.Option(help="File to write the address to.")] = None,
    max_failures: MaxFailures = None,
    checkpoints: CheckpointsUrl = None,
    resume: Resume = "auto",
    store: Annotated[
        Path | None, typer.Option(help="Folder of the job's record; a master that finds one there goes on with it.")
    ] = None,
) -> None:
    """Run the master of a job by hand.

    \b
    Example:
      evergrad master --job films --pservers 2 --listen tcp://127.0.0.1:7000
    """
    options = ["--listen", listen, "--job", job, "--pservers", str(pservers)]
    options += ["--max-failures", str(max_failures)] if max_failures is not None else []
    options += ["--checkpoints", shared_url(checkpoints)] if checkpoints is not None else []
    options += ["--resume", _resumed(resume)]
    options += ["--store", str(store)] if store is not None else []
    _become("master", options + (["--address-file", str(address_file)] if address_file else []))


@app.command()
def pserver(
    place: Annotated[int, typer.Option(min=0, help="Which part of the parameters it holds, from 0.")],
    log_dir: LogDir = LOG_DIR,
    master: Master = None,
    job: JobName = None,
    memory: Memory = None,
) -> None:
    """Run a pserver of a job by hand.

    \b
    Example:
      evergrad pserver --place 0 --master tcp://127.0.0.1:7000 --job films
    """
    job, master = _find(log_dir, master, job)
    options = ["--master", master, "--job", job, "--name", f"pserver-{place}", "--place", str(place)]
    _become("pserver", options + (["--memory", memory] if memory else []))


@app.command(context_settings=SCRIPT_ARGS)
def trainer(
    script: Annotated[
        str | None, typer.Argument(help="The training script; the job's own if left out.", metavar="SCRIPT")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Passed to the script.", metavar="ARGS")] = None,
    log_dir: LogDir = LOG_DIR,
    master: Master = None,
    job: JobName = None,
    seed: Seed = None,
) -> None:
    """Add a trainer to a running job.

    \b
    Example:
      evergrad trainer train.py --epochs 5
    """
    rest = list(args or ())
    if not (master or job):
        found = jobfile.read_latest(log_dir)
        seed = found.seed if seed is None else seed
        script, rest = (script, rest) if script else (found.script, list(found.args))
    job, master = _find(log_dir, master, job)
    if script is None or not Path(script).is_file():
        raise ConfigError(
            f"there is no script {script!r}; give the path of a Python file" if script else "name a script"
        )
    options = ["--master", master, "--job", job, "--name", f"trainer-p{os.getpid()}"]
    _become("trainer", options + (["--seed", str(seed)] if seed is not None else []) + [script, *rest])


app.add_typer(cli_checkpoints.app, name="checkpoints")
app.command()(cli_checkpoints.export)
app.command()(cli_checkpoints.reshard)


def _become(role: str, options: list[str]) -> NoReturn:
    os.environ.pop(PARENT_PID, None)  # its parent is not a launcher
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"evergrad.{role}", *options])
