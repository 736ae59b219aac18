"""A pull from another process, against the same bytes over bare ZeroMQ sockets."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import zmq

from evergrad.heap import keep_freed_memory
from evergrad.init_rows import normal
from evergrad.messages import (
    INIT_STEP,
    Address,
    Attempt,
    Commit,
    Floats,
    Generation,
    Member,
    Place,
    PserverAt,
    Push,
    Request,
    Restore,
    Schema,
    TableGrads,
    TableSpec,
    Term,
    UpdateName,
    UpdateSpec,
)
from evergrad.optim import Adagrad
from evergrad.pserver.pserver import Pserver
from evergrad.trainer.driver import Driver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.trainer import Identity, Trainer
from evergrad.wire.process import serve
from evergrad.wire.transport import Listener, Network

JOB = "benchmark"
LOOPBACK = "tcp://127.0.0.1:0"
GENERATION = Generation(1)


def pserver_with(rows: int, dim: int) -> tuple[Pserver, Schema]:
    """A pserver that holds one table of so many rows."""
    table = TableSpec("t", dim, Adagrad().spec(), normal())
    schema = Schema(0, UpdateSpec(UpdateName.SYNC, 1), (table,), ())
    pserver = Pserver(Member("pserver"))
    term, place = Term(1), Place(0)
    pserver.handle("master", Restore(term, GENERATION, pserver.member, place, 1, schema, None))
    pserver.handle("master", Commit(term, GENERATION, INIT_STEP, (), None))
    for step, keys in enumerate(np.array_split(np.arange(rows), max(1, rows // 500_000))):
        grads = (TableGrads(0, 0.01, keys, np.ones((keys.size, dim), np.float32)),)
        attempt = Attempt(1, step)
        pserver.handle("trainer", Push(Request(step), GENERATION, step, 0, attempt, 1, grads, ()))
        pserver.handle("master", Commit(term, GENERATION, step, ((0, attempt),), None))
    return pserver, schema


def _serve_pserver(pipe: Connection, rows: int, dim: int) -> None:
    keep_freed_memory()  # as a pserver does
    pserver, _ = pserver_with(rows, dim)
    listener = Listener(JOB, pserver.member, LOOPBACK)
    pipe.send(listener.address)
    serve(listener, lambda src, message, _: pserver.handle(src, message), lambda _: [], lambda: pipe.poll())
    listener.close()


def _serve_bytes(pipe: Connection, reply_bytes: int) -> None:
    """Answer whatever comes with so many bytes, from memory that was just written, as a pserver's is."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    pipe.send(f"tcp://127.0.0.1:{port}")
    source = np.random.default_rng(0).random(reply_bytes // 8)
    while not pipe.poll():
        if router.poll(50):
            peer, *_ = router.recv_multipart(copy=False)
            router.send_multipart([peer, source.copy()], copy=False)
    context.destroy(linger=0)


class Ours:
    """Pulls rows from a pserver in another process."""

    def __init__(self, address: str, rows: int, dim: int, keys: int, evaluating: bool = False) -> None:
        table = TableSpec("t", dim, Adagrad().spec(), normal())
        self._network = Network(JOB, "trainer")
        exchange = Exchange()
        self._driver = Driver(exchange, self._network)
        identity = Identity("trainer", 0, "")
        self._trainer = Trainer(exchange, Address("tcp://127.0.0.1:1"), identity, lambda: Member("trainer"))
        self._trainer.connect(
            Schema(0, UpdateSpec(UpdateName.SYNC, 1), (table,), ()),
            (PserverAt(Place(0), Member("pserver"), Address(address)),),
        )
        self._keys = np.random.default_rng(1).permutation(rows)[:keys]
        self._evaluating = evaluating

    def __call__(self) -> list[Floats]:
        """One pull."""
        pull = self._trainer.pull(GENERATION, -1, [(0, self._keys)], [], evaluating=self._evaluating)
        return self._driver.run(pull).rows

    def close(self) -> None:
        """Let go of the socket."""
        self._network.close()


class Bare:
    """Asks for bytes over a bare socket."""

    def __init__(self, address: str, request_bytes: int) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(address)
        self._request = b"x" * request_bytes

    def __call__(self) -> object:
        """One request and its answer."""
        self._dealer.send(self._request, copy=False)
        return self._dealer.recv_multipart(copy=False)

    def close(self) -> None:
        """Let go of the socket."""
        self._context.destroy(linger=0)


def ratio(rows: int, dim: int, keys: int, rounds: int) -> tuple[float, float, float]:
    """Median of the pairwise ratios of time, and the medians in milliseconds: of our pull and of bare sockets."""
    spawn = multiprocessing.get_context("spawn")
    jobs: list[tuple[Callable[..., None], tuple[int, ...]]] = [
        (_serve_pserver, (rows, dim)),
        (_serve_bytes, (keys * dim * 4,)),
    ]
    started = []
    for target, args in jobs:
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, *args))
        process.start()
        started.append((process, here, here.recv()))
    ours, bare = Ours(started[0][2], rows, dim, keys), Bare(started[1][2], keys * 8)
    try:
        for _ in range(5):
            ours(), bare()
        pairs = [(_timed(ours), _timed(bare)) for _ in range(rounds)]
    finally:
        ours.close()
        bare.close()
        for process, pipe, _ in started:
            pipe.send("stop")
            process.join()
    return (
        statistics.median(a / b for a, b in pairs),
        statistics.median(a for a, _ in pairs) * 1e3,
        statistics.median(b for _, b in pairs) * 1e3,
    )


def large_pull(keys: int, dim: int) -> tuple[float, float]:
    """Gigabytes of one pull, cut into messages, and seconds it takes; of rows that are not there, so read as zeros."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve_pserver, args=(there, 1000, dim))
    process.start()
    ours = Ours(here.recv(), keys, dim, keys, evaluating=True)
    try:
        began = time.perf_counter()
        (rows,) = ours()
        seconds = time.perf_counter() - began
        assert rows.shape == (keys, dim)
    finally:
        ours.close()
        here.send("stop")
        process.join()
    return rows.nbytes / 1e9, seconds


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def figures(quick: bool = False) -> Iterator[dict[str, object]]:
    """Both figures: a large pull and a small one."""
    keep_freed_memory()  # as a trainer does
    rows = 100_000 if quick else 1_000_000
    for name, dim, keys, target in (("12.8 MB", 64, 50_000, 1.5), ("256 rows", 32, 256, 2.0)):
        value, ours_ms, bare_ms = ratio(rows, dim, keys, 20 if quick else 100)
        yield {
            "name": f"remote pull of {name} / the same bytes over bare ZeroMQ",
            "value": value,
            "unit": f"x ({ours_ms:.2f} / {bare_ms:.2f} ms)",
            "target": f"<= {target}",
            "met": value <= target,
        }
    gigabytes, seconds = large_pull(1_000_000 if quick else 12_000_000, 64)
    yield {
        "name": f"remote pull of {gigabytes:.2f} GB in one call",
        "value": gigabytes / seconds,
        "unit": "GB/s",
        "target": "works",
        "met": True,
    }


if __name__ == "__main__":
    for figure in figures():
        print(figure)
