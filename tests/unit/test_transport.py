"""Sockets on this machine: who is refused, and that a listener outlives whatever it is sent."""

import random
import socket
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import zmq
from zmq.utils import garbage

from evergrad.errors import ConfigError, Fenced
from evergrad.messages import AskStatus, Exported, Noted, Request, Send
from evergrad.wire.codec import REFUSED, Codec, preamble
from evergrad.wire.transport import Listener, Network, check_address, new_member

ANY = "tcp://127.0.0.1:0"
JOB = "a job"
DEADLINE_S = 20.0


@pytest.fixture
def _zero_copy():
    """A test that sends without a copy; pyzmq's thread that lets go of what was sent would outlive it."""
    yield
    garbage.gc.stop()


def listener(job=JOB, listen=ANY):
    return closing(Listener(job, "listener", listen))


def network(job=JOB, member="asker"):
    return closing(Network(job, member))


def received(by, sends=(), count=1):
    """What comes until there are `count` messages."""
    found = by.exchange(sends, 0.0)
    end = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} messages came"
        found += by.exchange([], 0.05)
    return found


def counted(by, name, count=1):
    """Let a listener turn until its counter says so."""
    end = time.monotonic() + DEADLINE_S
    while by.counters[name] < count:
        assert time.monotonic() < end, f"counted {dict(by.counters)}"
        assert by.exchange([], 0.05) == []


@contextmanager
def dealer(address, identity=b"stranger"):
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        peer.set(zmq.IDENTITY, identity)
        peer.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        peer.connect(address)
        yield peer
    finally:
        peer.close(linger=0)
        context.term()


def check_it_goes_on(master):
    """A member is still answered."""
    with network(member="late") as asker:
        asker.send([Send(master.address, AskStatus(Request(5)))])
        assert received(master) == [("late", AskStatus(Request(5)))]
        master.send([Send("late", Noted(Request(5)))])
        assert received(asker) == [(master.address, Noted(Request(5)))]


def test_a_question_and_its_answer_find_each_other():
    with listener() as master:
        check_it_goes_on(master)


def test_port_zero_is_a_free_port_that_the_address_names():
    with listener() as one, listener() as other:
        assert one.address != other.address
        assert check_address(one.address) == one.address
        assert not one.address.endswith(":0")


def test_two_listeners_ask_each_other():
    with listener() as one, listener() as other:
        one.send([Send(other.address, AskStatus(Request(1)))])
        assert received(other) == [("listener", AskStatus(Request(1)))]


@pytest.mark.usefixtures("_zero_copy")
def test_arrays_arrive_as_they_were_sent():
    part = np.arange(1 << 18, dtype=np.float32).reshape(-1, 4)
    with listener() as master, network() as asker:
        asker.send([Send(master.address, Exported(Request(1), part, None))])
        ((_, message),) = received(master)
        assert (message.part == part).all()


def test_what_is_sent_before_anybody_listens_arrives_when_somebody_does():
    with listener() as placeholder:
        address = placeholder.address
    with network() as asker:
        asker.send([Send(address, AskStatus(Request(1)))])
        with listener(listen=address) as master:
            assert received(master) == [("asker", AskStatus(Request(1)))]


def test_one_of_another_job_is_refused_with_a_sentence_that_names_this_one():
    with listener(job="the job") as master, network(job="another") as asker:
        asker.send([Send(master.address, AskStatus(Request(1)))])
        counted(master, "malformed messages")
        with pytest.raises(Fenced, match="this is job 'the job'"):
            received(asker)
        check_other = network(job="the job", member="late")
        with check_other as late:
            late.send([Send(master.address, AskStatus(Request(2)))])
            assert received(master) == [("late", AskStatus(Request(2)))]


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://192.168.1.2:80", "tcp://a.org:1"])
def test_an_address_beyond_this_machine_is_refused_with_the_reason(address):
    with pytest.raises(ConfigError, match="no keys to keep strangers out"):
        check_address(address)
    with pytest.raises(ConfigError, match="no keys"):
        Listener(JOB, "listener", address)
    with network() as asker, pytest.raises(ConfigError, match="no keys"):
        asker.send([Send(address, AskStatus(Request(1)))])


@pytest.mark.parametrize(
    "address",
    ["", "localhost", "127.0.0.1:80", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://:5"],
)
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(ConfigError, match=r"write tcp://127\.0\.0\.1:PORT"):
        check_address(address)


def test_a_port_in_use_is_refused_and_nothing_is_left_open():
    with listener() as master, pytest.raises(ConfigError, match=f"cannot listen on {master.address}.*in use"):
        Listener(JOB, "listener", master.address)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.0\r\n\r\n", b"\0" * 100, b"\xff" * 1000, b"EGRD", b""])
def test_bytes_that_are_no_message_are_survived(garbage):
    with listener() as master:
        host, port = master.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as raw:
            raw.sendall(garbage)
            master.exchange([], 0.01)
            check_it_goes_on(master)


def test_random_bytes_are_survived(seed):
    rng = random.Random(seed)
    with listener() as master:
        host, port = master.address.removeprefix("tcp://").split(":")
        for _ in range(20):
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as raw:
                raw.sendall(rng.randbytes(rng.randrange(2000)))
            master.exchange([], 0.0)
        check_it_goes_on(master)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [b"EGRD", b"\x80"],
        [preamble(JOB)],
        [preamble(JOB), b""],
        [preamble(JOB), b"\xc1"],
        [preamble(JOB), b"\x80"],
        [preamble(JOB), *Codec(JOB).encode(AskStatus(Request(1)))[1:], b"one too many"],
        [preamble(JOB), b"\x83\xa4type\xa9AskStatus\xa7request\x01\xa1x" + b"\x91" * 100_000 + b"\x01"],
    ],
)
def test_a_malformed_message_is_counted_and_the_listener_goes_on(frames):
    with listener() as master, dealer(master.address) as stranger:
        stranger.send_multipart(frames)
        counted(master, "malformed messages")
        check_it_goes_on(master)


def test_a_stranger_is_told_in_a_form_that_never_changes():
    with listener() as master, dealer(master.address) as stranger:
        stranger.send_multipart([b"hello"])
        counted(master, "malformed messages")
        mark, sentence = stranger.recv_multipart()
        assert mark == REFUSED
        assert "connect with the same job and version" in sentence.decode()


@pytest.mark.parametrize("identity", [b"\xff\xfe", b"tcp://192.168.1.2:80", b"http://x"])
def test_a_sender_whose_name_cannot_be_one_is_counted_and_never_answered(identity):
    with listener() as master, dealer(master.address, identity) as stranger:
        stranger.send_multipart([bytes(f) for f in Codec(JOB).encode(AskStatus(Request(1)))])
        counted(master, "malformed messages")
        check_it_goes_on(master)


def test_a_malformed_answer_is_counted_and_the_asker_goes_on():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        with network() as asker:
            asker.send([Send(address, AskStatus(Request(1)))])
            peer = router.recv_multipart()[0]
            router.send_multipart([peer, b"garbage"])
            counted(asker, "malformed messages")
            router.send_multipart([peer, *Codec(JOB).encode(Noted(Request(1)))])
            assert received(asker) == [(address, Noted(Request(1)))]
    finally:
        router.close(linger=0)
        context.term()


def test_an_answer_to_one_that_is_gone_is_counted():
    with listener() as master:
        master.send([Send("nobody", Noted(Request(1)))])
        assert master.counters["dropped: a peer is gone"] == 1
        check_it_goes_on(master)


@pytest.mark.parametrize("address", ["tcp://192.168.1.2:80", "local://pserver-0", "tcp://127.0.0.1:x", "://"])
def test_an_address_that_a_peer_made_up_is_counted_and_the_listener_goes_on(address):
    with listener() as master:
        master.send([Send(address, Noted(Request(1)))])
        assert master.counters["dropped: not an address of this machine"] == 1
        check_it_goes_on(master)


def test_what_a_full_queue_does_not_take_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr("evergrad.wire.transport.QUEUE_MESSAGES", 3)
    with listener() as placeholder:
        address = placeholder.address
    with network() as asker:
        asker.send([Send(address, AskStatus(Request(n))) for n in range(50)])
        assert asker.counters["dropped: a peer's queue is full"] >= 40


def test_sockets_of_peers_that_have_long_said_nothing_are_closed_and_others_answer_still(monkeypatch):
    with listener() as master, listener() as other, network() as asker:
        asker.send([Send(f"tcp://127.0.0.1:{port}", AskStatus(Request(0))) for port in range(1, 4)])
        asker.send([Send(master.address, AskStatus(Request(1)))])
        monkeypatch.setattr("evergrad.wire.transport.SILENT_S", 0.0)
        asker.send([Send(other.address, AskStatus(Request(2)))])
        assert [*asker._peers] == [other.address]
        monkeypatch.setattr("evergrad.wire.transport.SILENT_S", 60.0)
        asker.send([Send(master.address, AskStatus(Request(3)))])
        questions = []
        while AskStatus(Request(3)) not in [question for _, question in questions]:
            questions += received(master)
        peer = questions[-1][0]
        master.send([Send(peer, Noted(Request(3)))])
        assert received(asker) == [(master.address, Noted(Request(3)))]


def test_there_are_no_more_sockets_than_allowed(monkeypatch):
    monkeypatch.setattr("evergrad.wire.transport.MOST_PEERS", 3)
    with network() as asker:
        asker.send([Send(f"tcp://127.0.0.1:{port}", AskStatus(Request(0))) for port in range(1, 9)])
        assert [*asker._peers] == [f"tcp://127.0.0.1:{port}" for port in (6, 7, 8)]


def test_no_two_members_have_one_name():
    names = {new_member("trainer-1") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("trainer-1.") for name in names)
