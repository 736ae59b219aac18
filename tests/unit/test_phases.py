"""How long a recovery took, phase by phase."""

from evergrad.master.phases import Phases


def test_a_recovery_is_told_phase_by_phase() -> None:
    phases = Phases()
    phases.begin("pserver-1 was lost", 10.0)
    phases.ended("until it was there again", 11.25)
    phases.ended("to load", 11.5)
    assert phases.close(12.0) == "2.00 s after pserver-1 was lost: 1.25 s until it was there again, 0.25 s to load"
    assert not phases.is_open


def test_what_is_lost_meanwhile_belongs_to_it_and_the_last_time_through_a_phase_counts() -> None:
    phases = Phases()
    phases.begin("pserver-1 was lost", 0.0)
    phases.ended("until all were there", 1.0)
    phases.begin("pserver-0 was lost", 1.5)
    phases.ended("until all were there", 3.0)
    assert phases.is_open
    assert phases.close(3.0) == "3.00 s after pserver-1 was lost: 3.00 s until all were there"


def test_without_a_loss_nothing_is_noted() -> None:
    phases = Phases()
    phases.ended("to load", 1.0)
    assert not phases.is_open
    phases.begin("pserver-0 was lost", 2.0)
    assert phases.close(3.0) == "1.00 s after pserver-0 was lost"
