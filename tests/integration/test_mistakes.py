"""What users and strangers do wrong: a clear sentence and a truthful status; and the job goes on where it can."""

import os
import random
import socket
import sys
from pathlib import Path

import psutil
import pytest
import zmq
from jobs import TRAIN, Alone, ByHand, Launched, digests, is_inside, python, reached, until
from safetensors.numpy import load_file

from evergrad.wire.codec import preamble

RAISES = """
import evergrad as eg, torch
job = eg.init()
optimizer = job.optimizer(torch.nn.Linear(1, 1), dense=eg.SGD(lr=0.1))
for epoch in job.epochs(1):
    for batch in job.batches({"x": [1.0, 2.0]}, batch_size=1):
        {"film": 1}["movie"]
"""
NO_STEP = """
import sys, torch, evergrad as eg
job = eg.init()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.table = eg.Embedding("id", 3)
model = Model()
optimizer = job.optimizer(model, dense=eg.SGD(lr=0.1), sparse=eg.SGD(lr=0.1))
for epoch in job.epochs(2):
    for batch in job.batches({"id": list(range(40))}, batch_size=4):
        (model.table(batch["id"]) * model.weight).sum().backward()
job.save_model(sys.argv[1])
"""
WITHOUT_RULE = """
import torch, evergrad as eg
job = eg.init(update=eg.Sync(batches_per_step=4))
model = torch.nn.ModuleList([eg.Embedding("user", 8)])
job.optimizer(model, sparse={"usr": eg.SGD(), "*": eg.SGD()})
"""
FLOAT_IDS = """
import sys, torch
from train import Ranker, dataset
import evergrad as eg
job = eg.init(update=eg.Sync(batches_per_step=4))
model = Ranker(8)
optimizer = job.optimizer(model, dense=eg.Adam(lr=lambda step: 1e-2 / (1 + step / 50)), sparse=eg.Adagrad(lr=0.05))
for epoch in job.epochs(2):
    for batch in job.batches(dataset(2000, 1), batch_size=16):
        model({**batch, "item": batch["item"].double()})
"""


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_what_the_script_raises_is_shown_once_and_ends_the_job_with_status_1(tmp_path: Path) -> None:
    with Launched(tmp_path, script(tmp_path, RAISES), pservers=2, trainers=2) as job:
        assert job.wait() == 1
        assert job.text.count("Traceback (most recent call last)") == 1, job.text
        assert "the script has raised in two tasks, and none was ever done; the last time, in trainer-" in job.text
        assert job.text.rstrip().endswith("KeyError: 'movie'")
        assert 'script.py", line 7, in <module>' in job.text
        assert "The job failed." in job.text
        assert "runpy" not in job.text


def test_a_script_that_leaves_with_a_status_ends_the_job_and_the_status_is_named(tmp_path: Path) -> None:
    leaves = RAISES.replace('{"film": 1}["movie"]', "raise SystemExit(3)")
    with Launched(tmp_path, script(tmp_path, leaves)) as job:
        assert job.wait() == 1
        assert job.text.count("the script left with status 3") == 1, job.text
        assert "Traceback" not in job.text


def test_a_script_that_never_calls_step_is_warned_once_and_trains_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    with Launched(tmp_path, script(tmp_path, NO_STEP), model) as job:
        assert job.wait() == 0, job.text
        assert job.text.count("optimizer.step() was not called for a batch") == 1, job.text
    assert load_file(model / "dense.safetensors")["weight"].tolist() == [1.0, 1.0, 1.0]
    assert load_file(model / "tables" / "id.safetensors")["keys"].size == 0


def test_a_script_that_never_calls_init_is_told_so(tmp_path: Path) -> None:
    with Launched(tmp_path, script(tmp_path, "print('nothing to do with it')")) as job:
        assert job.wait() == 2
        assert "never called eg.init(), so there was nothing to train" in job.text
        assert "Traceback" not in job.text


def test_trainers_that_do_not_fit_leave_with_one_sentence_and_the_job_goes_on(
    tmp_path: Path, alone: Alone, go: Path
) -> None:
    fitting = ("--out", tmp_path / "model")
    ids = script(tmp_path, f"import sys; sys.path.insert(0, {str(TRAIN.parent)!r})\n{FLOAT_IDS}", "ids.py")
    with ByHand(tmp_path, pservers=2) as job:
        good = job.trainer("good", TRAIN, *fitting, "--hold", f"epoch:0={go}")
        until(lambda: good.pid in reached(go), "epoch 0")
        misfits = {
            "another dim": (
                job.trainer("dim", TRAIN, *fitting, "--dim", 9),
                "this trainer's model is not the job's: table 'item' has dim 9, the job's 8; run the same script "
                "with the same arguments everywhere",
            ),
            "another seed": (
                job.trainer("seed", TRAIN, *fitting, "--seed", 5),
                "this trainer's model is not the job's: its seed is 5, the job's 0; run",
            ),
            "other data": (
                job.trainer("data", TRAIN, *fitting, "--samples", 1999),
                "batches: this trainer's data is not the job's (samples 2000 and 1999; content ",
            ),
            "another batch size": (
                job.trainer("size", TRAIN, *fitting, "--batch-size", 32),
                "batches: this trainer's data is not the job's (batch size 16 and 32); give all trainers the same",
            ),
            "an unknown table": (
                job.trainer("rule", script(tmp_path, WITHOUT_RULE)),
                "sparse= has a rule for 'usr'; the model's tables are user",
            ),
            "ids of a wrong type": (job.trainer("ids", ids), "table 'item': ids of torch.float64; give int64"),
        }
        for what, (misfit, sentence) in misfits.items():
            assert misfit.wait() == 2, f"{what}: {misfit.text}"
            assert f"evergrad trainer: {sentence}" in misfit.text
            assert "Traceback" not in misfit.text
        assert not job.status().ended
        go.touch()
        assert job.wait(good) == [0] * 4
    assert digests(tmp_path / "model") == alone(0)


@pytest.mark.parametrize("role", ["master", "pserver"])
def test_a_port_in_use_is_named_with_status_2(tmp_path: Path, role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        joining = () if role == "master" else ("--master", "tcp://127.0.0.1:1", "--place", 0)
        done = python("-m", f"evergrad.{role}", "--job", "films", "--listen", listen, *joining, cwd=tmp_path)
    assert done.returncode == 2
    assert f"cannot listen on {listen}: Address already in use; choose another port" in done.stderr
    assert "Traceback" not in done.stderr


def ports(pid: int) -> list[int]:
    """The ports a process listens on."""
    return [c.laddr.port for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]


def throw_bytes(port: int, chance: random.Random, job: str) -> None:
    """Random bytes over bare TCP; then, over ZeroMQ, random frames, and random messages that begin as the job's do."""
    for size in (1, 10, 64, 5000):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(chance.randbytes(size))
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for frames in range(1, 5):
            dealer.send_multipart([chance.randbytes(chance.randrange(200)) for _ in range(frames)])
            dealer.send_multipart([preamble(job), *(chance.randbytes(chance.randrange(1, 200)) for _ in range(frames))])
        assert dealer.poll(10_000), "a stranger is told that it is refused"
        assert dealer.recv_multipart()[0] == b"EGRD refused"
    context.term()


def test_random_bytes_at_every_port_are_refused_and_counted_and_change_no_bit(
    tmp_path: Path, alone: Alone, go: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with ByHand(tmp_path, pservers=2) as job:
        trainer = job.trainer(
            "trainer", TRAIN, "--out", tmp_path / "model", "--hold", f"epoch:1={go}", "--pause", 0.005
        )
        job.until(lambda s: is_inside(s, 3, epoch=0), "step 3")
        listening = {role: ports(role.pid) for role in (job.master, *job.pservers)}
        assert all(listening.values())
        for of_role in listening.values():
            for port in of_role:
                throw_bytes(port, chance, job.name)
        counted = job.until(lambda s: s.counters.get("malformed messages", 0) >= 8, "the master to count them")
        assert not counted.ended
        for pserver in job.pservers:
            until(lambda p=pserver: p.text.count("message.malformed") >= 8, "the pserver to note them")
        go.touch()
        assert job.wait(trainer) == [0] * 4
    assert digests(tmp_path / "model") == alone(0)


def test_a_process_of_another_job_is_told_whose_job_it_has_met(tmp_path: Path) -> None:
    with ByHand(tmp_path) as job:
        me = ("--master", job.address, "--job", "another", "--name", "lost")
        lost = job.start("lost", "-m", "evergrad.trainer", *me, TRAIN, "--out", tmp_path / "model")
        assert lost.wait() == 1
        assert f"this is job '{job.name}' of Evergrad" in lost.text
        assert lost.text.count("Traceback") == 0
        assert not job.status().ended


def test_master_and_pservers_start_without_torch() -> None:
    roles = "import evergrad.master.__main__, evergrad.pserver.__main__, evergrad.kernels.warm as w; w.warm()"
    done = python("-c", f"import sys; {roles}; print('torch' in sys.modules)", cwd=Path(os.sep))
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_running_master_and_pserver_processes_have_not_loaded_torch(tmp_path: Path) -> None:
    with ByHand(tmp_path) as job:
        job.until(lambda s: len(s.members) == 1, "the pserver to join")
        for role in (job.master, *job.pservers):
            libraries = Path(f"/proc/{role.pid}/maps").read_text()
            assert "libtorch" not in libraries
            assert sys.prefix in libraries or "/site-packages/" in libraries
