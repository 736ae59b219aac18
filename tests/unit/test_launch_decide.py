"""The launcher's decisions, case by case."""

import signal

import pytest

from evergrad.launch.decide import LEFT, RAISED, Confirm, End, Finish, LetGo, Restart, backoff_s, decide, how
from evergrad.messages import Role


def end(role: Role, status: int, *, restarts: int = 0, others: int = 2) -> End:
    return End(role=role, status=status, restarts=restarts, max_restarts=3, others=others)


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 3, 137])
def test_a_trainer_that_died_is_started_again(status: int) -> None:
    assert decide(end(Role.TRAINER, status)) == Restart(0.5)


def test_the_wait_before_a_restart_doubles_up_to_ten_seconds() -> None:
    assert [backoff_s(n) for n in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff_s(10**9) == 10.0


def test_a_trainer_beyond_its_restarts_is_let_go_while_there_are_others() -> None:
    action = decide(end(Role.TRAINER, -signal.SIGKILL, restarts=3))
    assert action == LetGo("was killed by SIGKILL and has been restarted 3 times; the job goes on without it")


def test_the_last_trainer_beyond_its_restarts_ends_the_job() -> None:
    action = decide(end(Role.TRAINER, -signal.SIGSEGV, restarts=3, others=0))
    assert action == Finish(1, "was killed by SIGSEGV and has been restarted 3 times; there is no other trainer")


@pytest.mark.parametrize("status", [LEFT, -signal.SIGTERM])
def test_a_trainer_that_was_asked_to_leave_is_not_started_again(status: int) -> None:
    assert isinstance(decide(end(Role.TRAINER, status)), LetGo)


@pytest.mark.parametrize("role", [Role.MASTER, Role.PSERVER])
@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM, 3, LEFT])
def test_without_the_master_or_a_pserver_the_job_cannot_go_on(role: Role, status: int) -> None:
    action = decide(end(role, status))
    assert action == Finish(1, f"{how(status)}, and what it held in memory is lost")


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
    assert isinstance(decide(end(Role.TRAINER, 2, restarts=1, others=1)), LetGo)
    assert decide(end(Role.TRAINER, 2, restarts=1, others=0)) == Finish(2, None)
    assert decide(end(Role.TRAINER, 2, restarts=0, others=1)) == Finish(2, None)


def test_a_trainer_whose_script_raised_in_a_task_is_always_started_again() -> None:
    for restarts, others in ((0, 1), (3, 1), (99, 0)):
        assert decide(end(Role.TRAINER, RAISED, restarts=restarts, others=others)) == Restart(0.5)
    assert how(RAISED) == "left since its script raised"
