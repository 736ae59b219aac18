"""Requests are sent again until they are answered, with ever longer pauses."""

from itertools import pairwise

import pytest

from evergrad.messages import Noted, Pushed, Request, Restored, Send, Stale
from evergrad.trainer.exchange import RESEND_MAX_S, RESEND_S, Exchange


def ask(exchange, count=1):
    """A flow that asks `count` things, and their ids; it has begun."""
    ids = [exchange.number() for _ in range(count)]
    flow = exchange.ask([(request, Send(f"to-{request}", Noted(request))) for request in ids])
    next(flow, None)
    return flow, ids


def result(flow):
    with pytest.raises(StopIteration) as stopped:
        next(flow)
    return stopped.value.value


def test_no_two_requests_have_one_id():
    exchange = Exchange()
    assert len({exchange.number() for _ in range(100)}) == 100


def test_a_request_is_sent_at_once_and_not_again_before_its_time():
    exchange = Exchange()
    _, (request,) = ask(exchange)
    assert exchange.due(0.0) == [Send(f"to-{request}", Noted(request))]
    assert exchange.due(0.0) == []
    assert exchange.due(RESEND_S - 0.01) == []


def test_a_request_is_sent_again_under_its_id_after_ever_longer_pauses_up_to_a_limit():
    exchange = Exchange()
    _, (request,) = ask(exchange)
    sent = [t for t in range(100) for send in exchange.due(float(t)) if send.message.request == request]
    pauses = [b - a for a, b in pairwise(sent)]
    assert pauses[:4] == [RESEND_S, 2 * RESEND_S, 4 * RESEND_S, 8 * RESEND_S]
    assert set(pauses[3:]) == {RESEND_MAX_S}


def test_what_was_sent_to_one_that_may_not_have_heard_it_can_be_hurried():
    exchange = Exchange()
    one, (first,) = ask(exchange)
    exchange.due(0.0)
    exchange.hurry()
    other, (second,) = ask(exchange)
    assert [send.message.request for send in exchange.due(0.1)] == [first, second]
    assert exchange.due(0.2) == []
    one.close()
    other.close()


def test_a_flow_waits_until_all_is_answered_and_only_what_is_not_is_sent_again():
    exchange = Exchange()
    flow, (one, two) = ask(exchange, 2)
    exchange.due(0.0)
    exchange.receive(Pushed(two))
    next(flow)
    assert [send.to for send in exchange.due(RESEND_S)] == [f"to-{one}"]
    exchange.receive(Pushed(one))
    assert result(flow) == [Pushed(one), Pushed(two)]
    assert exchange.due(100.0) == []


def test_answers_come_in_the_order_of_the_requests():
    exchange = Exchange()
    flow, (one, two) = ask(exchange, 2)
    exchange.receive(Stale(two, 1, 4))
    exchange.receive(Pushed(one))
    assert result(flow) == [Pushed(one), Stale(two, 1, 4)]


def test_answers_are_told_of_as_they_come_each_once():
    exchange, heard = Exchange(), []
    ids = [exchange.number() for _ in range(3)]
    flow = exchange.ask([(request, Send("to", Noted(request))) for request in ids], lambda *told: heard.append(told))
    next(flow)
    assert heard == []
    exchange.receive(Pushed(ids[2]))
    next(flow)
    exchange.receive(Pushed(ids[0]))
    next(flow)
    assert heard == [(2, Pushed(ids[2])), (0, Pushed(ids[0]))]
    exchange.receive(Pushed(ids[1]))
    assert result(flow) == [Pushed(request) for request in ids]
    assert heard[2:] == [(1, Pushed(ids[1]))]


def test_the_first_answer_counts_and_a_second_is_dropped():
    exchange = Exchange()
    flow, (request,) = ask(exchange)
    exchange.receive(Stale(request, 1, 4))
    exchange.receive(Pushed(request))
    assert result(flow) == [Stale(request, 1, 4)]


def test_late_and_unasked_answers_are_dropped():
    exchange = Exchange()
    flow, (request,) = ask(exchange)
    exchange.receive(Pushed(request))
    result(flow)
    later, (other,) = ask(exchange)
    exchange.receive(Pushed(request))
    exchange.receive(Pushed(Request(other + 1)))
    exchange.receive(Restored(1, 1, 0, "p", 0))
    assert next(later) is None
    exchange.receive(Pushed(other))
    assert result(later) == [Pushed(other)]


def test_nothing_asked_is_answered_at_once():
    assert result(Exchange().ask([])) == []


def test_a_flow_given_up_asks_no_more():
    exchange = Exchange()
    flow, (request,) = ask(exchange)
    flow.close()
    exchange.receive(Pushed(request))
    assert exchange.due(0.0) == []
