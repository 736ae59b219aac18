"""What must hold when a run is over, whatever the update rule."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from evergrad.master.master import Master
from evergrad.messages import Request

from . import judge_async, judge_sync
from .faults import Kind
from .oracle import Call
from .whole import frozen_values

if TYPE_CHECKING:
    from .world import World


def judge(world: "World") -> None:
    """Find what is wrong with a run."""
    master = world.master_process.master
    if not world.is_over():
        status = master.status(Request(0), world.clock.now_s)
        world.fault(Kind.ENDLESS, f"master is_over={master.is_over}; waits for {status.waiting_for!r}")
    elif reason := _wrong_end(master):
        world.fault(Kind.FAILED, reason)
    elif world.plan.checkpoints is not None and not world.watch.moments.stand_in():
        return
    elif len(set(frozen_values(world))) > 1:
        world.fault(Kind.TORN, f"the initial values are those of several trainers: {frozen_values(world)}")
    else:
        if world.plan.checkpoints is not None:
            world.watch.moments.judge()
        expected = (judge_sync if world.plan.is_sync else judge_async).judge(world)
        if expected is not None:
            _judge_calls(world, *expected)


def _wrong_end(master: Master) -> str | None:
    """Why a job should not have ended as it did: it fails if tasks were set aside, saying so, and only then."""
    aside = master.status(Request(0), 0.0).set_aside
    if master.failure is None:
        return f"the job has succeeded without {aside}" if aside else None
    return None if aside and "until they were set aside" in master.failure else master.failure


def _judge_calls(world: "World", model_at: Callable[[Call], dict], totals: dict[Call, np.ndarray]) -> None:
    """Evaluations and savings saw the model of their place in the script, and every saving was done."""
    watch, plan = world.watch, world.plan
    unsure = watch.unsure if plan.may_differ else set()
    for call, results in watch.results.items():
        if call not in unsure and results.tobytes() != totals[call].tobytes():
            world.fault(Kind.EVALUATION, f"evaluation {call} found {results}, not {totals[call]}")
    calls = {(e, n) for e in plan.visited() if e != plan.leaves_epochs for n in range(plan.epochs[e].saves)}
    calls |= {(len(plan.epochs), n) for n in range(plan.last_saves)}
    if calls != watch.saved.keys():
        world.fault(Kind.SAVED, f"models were saved at {sorted(watch.saved)}, not at {sorted(calls)}")
    for call, saved in watch.saved.items():
        if call not in unsure and any(model != model_at(call) for model in saved):
            world.fault(Kind.SAVED, f"one of the {len(saved)} models written at {call}")
