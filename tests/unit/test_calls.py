"""Evaluations and saving: shared out, done once, the same for all."""

import numpy as np
import pytest

from evergrad.master.calls import Evaluation, Saving
from evergrad.master.dispatch import AttemptNumbers
from evergrad.messages import Attempt, DataSpec, EvalDone, Generation, Member, Term
from evergrad.metrics import partial, result

A, B = Member("a"), Member("b")


def evaluation(samples=5, batch_size=2):
    return Evaluation(DataSpec(samples, "valid", batch_size), AttemptNumbers(Term(1)))


def done(attempt, totals):
    return EvalDone(Generation(1), attempt, totals)


def tenth(n):
    return {"loss": partial(np.array(0.1 * n))}


def test_an_evaluation_is_shared_out_as_batches():
    call = evaluation()
    assert [call.hand_out(A, 0.0)[1:] for _ in range(3)] == [(0, 2), (2, 4), (4, 5)]
    assert call.hand_out(A, 0.0) is None


def test_an_evaluation_is_done_when_all_its_batches_are():
    call = evaluation()
    attempts = [call.hand_out(A, 0.0)[0] for _ in range(3)]
    for attempt in attempts:
        assert not call.is_done
        call.finish(done(attempt, tenth(1)))
    assert call.is_done
    assert result(call.totals["loss"]) == pytest.approx(0.3)


def test_totals_are_added_in_the_order_of_tasks_whatever_the_order_they_come_in():
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        call = evaluation()
        attempts = [call.hand_out(A, 0.0)[0] for _ in range(3)]
        for i in order:
            call.finish(done(attempts[i], {"loss": partial(np.array([1e16, 1.0, -1e16][i]))}))
        found.append(call.totals["loss"].values.tobytes())
    assert len(set(found)) == 1


def test_a_batch_evaluated_twice_counts_once():
    call = evaluation(samples=2)
    first = call.hand_out(A, 0.0)[0]
    call.release(A)
    second = call.hand_out(B, 0.0)[0]
    call.finish(done(first, tenth(1)))
    call.finish(done(second, tenth(1)))
    call.finish(done(Attempt(9, 9), tenth(1)))
    assert result(call.totals["loss"]) == pytest.approx(0.1)


def test_an_evaluation_of_no_samples_is_done_at_once_with_no_totals():
    call = evaluation(samples=0)
    assert call.is_done
    assert call.totals == {}


def test_batches_with_other_metrics_are_an_error_that_names_both():
    call = evaluation(samples=4)
    first, second = (call.hand_out(A, 0.0)[0] for _ in range(2))
    call.finish(done(first, tenth(1)))
    call.finish(done(second, {"auc": partial(1.0)}))
    assert call.is_done
    assert "['loss'] and ['auc']" in call.failure


def test_an_evaluation_in_which_the_script_raises_is_over_for_all():
    call = evaluation(samples=4)
    first, second = (call.hand_out(A, 0.0)[0] for _ in range(2))
    call.finish(EvalDone(Generation(1), first, {}, "ValueError"))
    call.finish(done(second, tenth(1)))
    assert call.is_done
    assert call.failure == "ValueError"


def test_one_member_saves_and_the_next_only_if_it_gives_up():
    call = Saving("model", AttemptNumbers(Term(1)))
    attempt = call.hand_out(A, 0.0)
    assert call.hand_out(B, 0.0) is None
    call.release(A)
    assert call.hand_out(B, 0.0) not in (None, attempt)


def test_a_saving_is_done_when_it_is_reported_and_keeps_why_it_failed():
    call = Saving("model", AttemptNumbers(Term(1)))
    attempt = call.hand_out(A, 0.0)
    call.finish(Attempt(9, 9), "an unknown attempt")
    assert not call.is_done
    call.finish(attempt, "the disk is full")
    assert call.is_done
    assert call.failure == "the disk is full"
    call.finish(attempt, None)
    assert call.failure == "the disk is full"
