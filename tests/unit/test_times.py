"""Which time must exceed which; `docs/guarantees.md` says why, and states the values."""

import re
from pathlib import Path

import pytest

from evergrad.launch import decide, link, run
from evergrad.launch.commands import Plan
from evergrad.master import __main__ as master_process
from evergrad.master import master, members, pservers, training
from evergrad.pserver import __main__ as pserver_process
from evergrad.trainer import driver, exchange, session
from evergrad.wire import process

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"
LEASE_S = master_process.LEASE_S


def test_a_lease_outlasts_several_lost_heartbeats() -> None:
    assert LEASE_S >= 5 * process.BEAT_S


def test_a_pause_of_the_master_too_short_to_be_excused_cannot_use_up_a_lease() -> None:
    assert master.PAUSE_S + 2 * process.BEAT_S < LEASE_S
    assert master.PAUSE_S > 5 * process.TICK_S, "a busy master is not a paused one"


def test_a_spare_trainer_gets_a_frozen_ones_task_before_its_lease_is_over() -> None:
    assert training.BACKUP_MIN_S < LEASE_S


def test_a_pserver_and_a_master_are_waited_for_much_longer_than_a_trainer() -> None:
    assert members.PSERVER_LEASE_S >= 10 * LEASE_S
    assert driver.SILENCE_S >= 10 * LEASE_S


def test_a_goodbye_and_a_commit_that_are_lost_are_said_again_in_time() -> None:
    assert session.GOODBYE_S > exchange.RESEND_S
    assert pservers.RESEND_S < training.BACKUP_MIN_S


def test_requests_are_sent_again_several_times_before_who_is_asked_is_given_up() -> None:
    assert exchange.RESEND_S < exchange.RESEND_MAX_S < driver.SILENCE_S / 3
    assert pserver_process.JOIN_DEADLINE_S > run.MASTER_WITHIN_S


def test_trainers_that_are_told_to_leave_have_time_for_a_batch_and_a_goodbye() -> None:
    assert run.LEAVING_WITHIN_S > 2 * (session.GOODBYE_S + driver.TURN_S)


def test_at_the_end_the_master_stays_for_longer_than_the_others_may_take_to_hear_it() -> None:
    assert master_process.LAUNCHED_LINGER_S > run.ENDING_WITHIN_S > exchange.RESEND_MAX_S
    assert run.STOPPING_WITHIN_S > 5 * link.ASK_EVERY_S
    assert run.CONFIRM_WITHIN_S > 5 * link.ASK_EVERY_S
    assert run.ORPHANED_WITHIN_S >= process.ORPHAN_S


def test_waiting_between_restarts_never_looks_like_a_steady_run_and_the_budget_is_soon_used_up() -> None:
    assert decide.STEADY_S > 2 * decide.LONGEST_BACKOFF_S
    assert 2 * Plan(script="").max_restarts * decide.LONGEST_BACKOFF_S < decide.BUDGET_S


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("heartbeat", [process.BEAT_S]),
        ("lease of a trainer", [LEASE_S]),
        ("lease of a pserver", [members.PSERVER_LEASE_S]),
        ("pause of the master", [master.PAUSE_S]),
        ("resending of a request", [exchange.RESEND_S, exchange.RESEND_MAX_S]),
        ("resending of a commit", [pservers.RESEND_S]),
        ("backup of a slow task", [training.BACKUP_MIN_S]),
        ("a master silent for a trainer", [driver.SILENCE_S]),
        ("a launcher gone", [process.ORPHAN_S]),
        ("a trainer that leaves", [run.LEAVING_WITHIN_S]),
        ("goodbye", [session.GOODBYE_S]),
        ("the others, when the job has ended", [run.ENDING_WITHIN_S]),
        ("the master, when the job has ended", [master_process.LAUNCHED_LINGER_S]),
        ("wait before a restart", [decide.FIRST_BACKOFF_S, decide.LONGEST_BACKOFF_S]),
        ("a steady run", [decide.STEADY_S]),
    ],
)
def test_the_documented_values_are_those_of_the_program(row: str, values: list[float]) -> None:
    (value,) = re.findall(rf"^\| {row} \| ([^|]+) \|", GUARANTEES.read_text(), flags=re.MULTILINE)
    assert [float(number) for number in re.findall(r"(\d+(?:\.\d+)?) s\b", value)] == values
