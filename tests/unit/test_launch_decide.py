"""The launcher's decisions, case by case."""

import signal

import pytest

from evergrad.launch.decide import LEFT, RAISED, Confirm, End, Finish, LetGo, Restart, backoff_s, decide, how
from evergrad.messages import Role

HOUR = 3600.0


def end(role: Role, status: int, *, restarts_s: tuple[float, ...] = (), most: int = 3, others: int = 2) -> End:
    return End(role=role, status=status, restarts_s=restarts_s, max_restarts=most, others=others)


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 3, 137])
def test_a_trainer_that_died_is_started_again(status: int) -> None:
    assert decide(end(Role.TRAINER, status)) == Restart(0.0, f"{how(status)}; it starts again now")


def test_the_wait_before_a_restart_doubles_up_to_four_seconds_while_no_run_lasts() -> None:
    every_second = [tuple(float(age) for age in range(n, 0, -1)) for n in range(8)]
    assert [backoff_s(restarts) for restarts in every_second] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert backoff_s(tuple(0.001 * age for age in range(10_000, 0, -1))) == 4.0


def test_a_run_of_ten_seconds_makes_up_for_all_restarts_before() -> None:
    assert backoff_s((16.0, 14.0, 12.0, 10.0)) == 0.0
    assert backoff_s((16.0, 14.0, 12.0, 9.0)) == 4.0
    assert backoff_s((300.0, 299.0, 200.0, 9.0)) == 0.5, "only the last run was short"


def test_the_wait_is_said() -> None:
    action = decide(end(Role.TRAINER, -signal.SIGKILL, restarts_s=(3.0, 1.0)))
    assert action == Restart(1.0, "was killed by SIGKILL; it starts again in 1 s")


def test_restarts_longer_ago_than_an_hour_do_not_count() -> None:
    long_job = tuple(HOUR * age for age in range(1000, 0, -1))
    assert decide(end(Role.TRAINER, -signal.SIGKILL, restarts_s=long_job)) == Restart(
        0.0, "was killed by SIGKILL; it starts again now"
    )


def test_a_trainer_that_dies_too_often_is_shut_out_until_one_of_its_restarts_is_an_hour_ago() -> None:
    action = decide(end(Role.TRAINER, -signal.SIGKILL, restarts_s=(5000.0, 3000.0, 2000.0, 1000.0)))
    assert action == Restart(
        600.0, "was killed by SIGKILL and has been restarted 3 times within an hour; it starts again in 10 min"
    )


def test_with_no_restarts_allowed_a_trainer_that_dies_is_let_go() -> None:
    action = decide(end(Role.TRAINER, -signal.SIGKILL, most=0))
    assert action == LetGo("was killed by SIGKILL; the job goes on without it")


def test_the_last_trainer_beyond_its_restarts_ends_the_job() -> None:
    action = decide(end(Role.TRAINER, -signal.SIGSEGV, restarts_s=(30.0, 20.0, 10.0), others=0))
    reason = "was killed by SIGSEGV and has been restarted 3 times within an hour; there is no other trainer"
    assert action == Finish(1, reason)


@pytest.mark.parametrize("status", [LEFT, -signal.SIGTERM])
def test_a_trainer_that_was_asked_to_leave_is_not_started_again(status: int) -> None:
    assert isinstance(decide(end(Role.TRAINER, status)), LetGo)


@pytest.mark.parametrize("role", [Role.MASTER, Role.PSERVER])
@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM, 3, LEFT])
def test_a_master_or_a_pserver_that_died_is_started_again(role: Role, status: int) -> None:
    assert decide(end(role, status)) == Restart(0.0, f"{how(status)}; it starts again now")


@pytest.mark.parametrize("role", [Role.MASTER, Role.PSERVER])
def test_without_a_master_or_a_pserver_that_dies_again_and_again_the_job_has_failed(role: Role) -> None:
    action = decide(end(role, -9, restarts_s=(30.0,) * 10))
    assert action == Finish(1, "was killed by SIGKILL and has been restarted 10 times within an hour")


@pytest.mark.parametrize("role", [Role.MASTER, Role.PSERVER, Role.TRAINER])
def test_a_mistake_of_the_user_ends_the_job_with_status_2(role: Role) -> None:
    assert decide(end(role, 2)) == Finish(2, None)


def test_the_master_alone_says_by_leaving_that_the_job_is_over() -> None:
    assert decide(end(Role.MASTER, 0)) == Finish(0, None)
    assert decide(end(Role.MASTER, 1)) == Finish(1, None)
    assert decide(end(Role.PSERVER, 0)) == Confirm()
    assert decide(end(Role.TRAINER, 0)) == Confirm()


def test_a_failed_trainer_ends_the_job() -> None:
    assert decide(end(Role.TRAINER, 1)) == Finish(1, None)


def test_how_a_process_ended_is_said_in_words() -> None:
    assert how(-9) == "was killed by SIGKILL"
    assert how(-99) == "was killed by signal 99"
    assert how(3) == "exited with status 3"


def test_a_trainer_that_fits_no_more_when_it_is_started_again_does_not_end_the_job() -> None:
    assert isinstance(decide(end(Role.TRAINER, 2, restarts_s=(9.0,), others=1)), LetGo)
    assert decide(end(Role.TRAINER, 2, restarts_s=(9.0,), others=0)) == Finish(2, None)
    assert decide(end(Role.TRAINER, 2, others=1)) == Finish(2, None)


def test_a_trainer_whose_script_raised_in_a_task_is_always_started_again() -> None:
    for restarts_s, others in (((), 1), ((9.0,) * 3, 1), ((9.0,) * 99, 0)):
        action = decide(end(Role.TRAINER, RAISED, restarts_s=restarts_s, others=others))
        assert action == Restart(0.5, "asked to be started again; it starts again in 0.5 s")
