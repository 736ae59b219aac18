"""A trainer's process: `python -m evergrad.trainer ... SCRIPT [ARGS]` runs a training script as part of a job."""

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path

from evergrad.errors import ConfigError, DataError, EvergradError, Fenced, Unavailable
from evergrad.messages import Raised
from evergrad.trainer import session
from evergrad.trainer.driver import LEFT_STATUS, Leaving
from evergrad.trainer.trainer import AGAIN_STATUS, JobOver, MustStartAgain
from evergrad.wire.process import log_to_stderr, on_sigterm

RAISED_STATUS = 75
"""The exit status of a trainer whose script raised in a task: the job goes on, with this process started again."""
LONGEST_SENTENCE = 300


def main() -> int:
    """Run the script; returns the exit status.

    The job's; 143 after SIGTERM; 2 for a mistake of this script; 75 if it is to be started again, since it raised in a
    task, which others now try, or the job has fallen back behind it.
    """
    options = _parse()
    log_to_stderr()
    os.environ.update({session.MASTER: options.master, session.JOB: options.job, session.NAME: options.name})
    if options.seed is not None:
        os.environ[session.SEED] = str(options.seed)

    def leave() -> None:
        if session.current is None:
            raise Leaving
        session.current.driver.is_leaving = True

    on_sigterm(leave)
    try:
        return _run(options.script, options.args)
    except Leaving:
        _goodbye(None)
        return LEFT_STATUS
    except MustStartAgain:
        _goodbye(None)
        return AGAIN_STATUS
    except JobOver as over:
        _goodbye(None)
        return 0 if over.failure is None else 1
    finally:
        if session.current is not None:
            session.current.driver.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evergrad trainer", description="Run a training script as part of a job.")
    parser.add_argument("--master", required=True, help="the master's address, tcp://127.0.0.1:PORT")
    parser.add_argument("--job", required=True, help="the job's name")
    parser.add_argument("--name", default=f"trainer-{os.getpid()}", help="what people call this process")
    parser.add_argument("--seed", type=int, help="the job's seed, instead of the script's")
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args()


def _run(script: Path, args: list[str]) -> int:
    if not script.is_file():
        print(f"evergrad trainer: there is no script {script}", file=sys.stderr)
        return 2
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        _run_script(script)
        if session.current is not None:
            session.current.finish()
    except (Leaving, JobOver, MustStartAgain):
        raise
    except SystemExit as exit:
        how = f"with status {exit.code}" if isinstance(exit.code, int | None) else f"saying {exit.code!r}"
        inside = session.current.inside if session.current is not None else ""
        return _failed(" ".join(word for word in ("left", inside, how) if word) + "\n", 1)
    except BaseException as error:
        return _raised(error)
    if session.current is None:
        print(f"evergrad trainer: {script} never called eg.init(), so there was nothing to train", file=sys.stderr)
        return 2
    return 0


def _raised(error: BaseException) -> int:
    """The script has raised: in a task, where it is the task's, or elsewhere."""
    task = session.current.task if session.current is not None else None
    is_ours = isinstance(error, EvergradError) and not isinstance(error, DataError)
    if task is not None and isinstance(error, Exception) and not is_ours:
        raised = Raised(task.generation, task.attempt, task.batches, _sentence(error))
        print(f"evergrad trainer: the script raised {raised.error} in a task, which others try now", file=sys.stderr)
        return _failed(f"raised:\n{_traceback()}", RAISED_STATUS, raised)
    match error:
        case ConfigError():
            print(f"evergrad trainer: {error}", file=sys.stderr, flush=True)
            _goodbye(None)
            return 2
        case Unavailable() | Fenced():  # there is no job, or none of ours, to tell
            print(f"evergrad trainer: {error}", file=sys.stderr, flush=True)
            return 1
        case EvergradError():
            return _failed(f"raised {type(error).__name__}: {error}\n", 1)
        case _:
            return _failed(f"raised:\n{_traceback()}", 1)


def _run_script(script: Path) -> None:
    """Run the script; leaving it with status 0, outside its loops, is its end as any other."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit:
        is_inside = session.current is not None and session.current.inside
        if isinstance(exit, Leaving | JobOver | MustStartAgain) or exit.code not in (None, 0) or is_inside:
            raise


def _traceback() -> str:
    """The traceback of what the script raised, without the frames of those who ran it."""
    kind, error, frames = sys.exc_info()
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(kind, error, frames))


def _sentence(error: Exception) -> str:
    """An exception in one line of a decent length: "KeyError: 'movie'"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:LONGEST_SENTENCE] if lines else type(error).__name__


def _failed(failure: str, status: int, raised: Raised | None = None) -> int:
    """Tell the job, which ends with this and shows it once, or goes on; where there is none any more, tell the user."""
    try:
        is_told = (session.current or session.connect(os.environ, numerics="")).leave(failure, raised)
    except JobOver:
        is_told = True
    except EvergradError:
        is_told = False
    if not is_told:
        print(failure, file=sys.stderr, end="", flush=True)
    return status


def _goodbye(failure: str | None) -> None:
    if session.current is not None:
        session.current.leave(failure)


if __name__ == "__main__":
    sys.exit(main())
