"""Checkpoints of a job inside one process: a run that was given up is gone on with by the next."""

import gc
import logging
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import evergrad as eg
from evergrad.checkpoint.catalogue import entries
from evergrad.checkpoint.claim import LOCK
from evergrad.checkpoint.storage import Storage
from evergrad.job.embedded import _stop, embedded_session
from evergrad.job.job import Job
from evergrad.messages import Schema
from evergrad.trainer.driver import Driver
from evergrad.trainer.trainer import Offer

DATA = {"id": np.arange(60), "x": np.linspace(-1, 1, 60, dtype=np.float32)}
UPDATES = {
    "sync": eg.Sync(batches_per_step=2),
    "async": eg.Async(batches_per_task=2),
    "local": eg.LocalSGD(steps=2, tasks_per_round=2),
}


class Stopped(Exception):
    """The run is given up here."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.id = eg.Embedding("id", 3, init=eg.init_rows.normal(std=0.1))
        self.into = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, batch):
        return self.into(torch.cat([self.id(batch["id"]), batch["x"][:, None]], dim=-1))


class Run:
    """One run of a script; it may be given up after so many batches."""

    def __init__(self, folder, update="sync", pservers=1, stop_at=None, out=None, epochs=3, every=2, keep=3, **more):
        torch.manual_seed(0)
        rule = UPDATES[update]
        plan = eg.Checkpoints(folder, every=every, keep=keep, best=more.get("best")) if folder else None
        offer = Offer("", plan.spec() if plan else None, more.get("warm_start"))
        self.session = embedded_session(pservers)
        local = rule if isinstance(rule, eg.LocalSGD) else None
        schema = Schema(0, rule.spec(), (), ())
        self.job = Job(self.session, schema, True, False, local, plan, offer)
        self.seen, self.totals, self.epochs = 0, {}, []
        self._data = more.get("data", DATA)
        with suppress(Stopped), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._train(stop_at, out, epochs)

    def _train(self, stop_at, out, epochs):
        job, model = self.job, Model()
        optimizer = job.optimizer(model, dense=eg.Adam(lr=0.01), sparse=eg.Adagrad(lr=0.1))

        def count(batch):
            return {"n": len(batch["id"]), "loss": eg.metrics.mean(model(batch))}

        self.totals[-1] = job.evaluate(count, self._data, batch_size=16)
        for epoch in job.epochs(epochs):
            self.epochs.append(epoch)
            for batch in job.batches(self._data, batch_size=4):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                self.seen += 1
                if self.seen == stop_at:
                    self.wait()
                    raise Stopped
            self.totals[epoch] = job.evaluate(count, self._data, batch_size=16)
            job.report({"loss": self.totals[epoch]["loss"]})
        job.save_model(out)
        self.wait()

    def wait(self):
        """Until everything cut is written."""
        network = self.session.driver._carrier
        while network._is_busy:
            network._wait()

    def end(self):
        self.session.driver.close()


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(folder=None, **options):
        runs.append(Run(folder, out=tmp_path / "model", **options))
        return runs[-1]

    yield start
    for each in runs:
        each.end()


def model_of(tmp_path: Path) -> dict:
    files = [tmp_path / "model" / "dense.safetensors", tmp_path / "model" / "tables" / "id.safetensors"]
    return {f"{file.name} {name}": t.tobytes() for file in files for name, t in load_file(file).items()}


def serials(folder: Path) -> list[int]:
    return [e.serial for e in entries(Storage(folder)) if e.manifest is not None]


@pytest.mark.parametrize("update", UPDATES)
def test_a_run_given_up_is_gone_on_with_by_another_number_of_pservers_with_the_same_bits(run, tmp_path, update):
    whole = run(update=update)
    wanted = model_of(tmp_path)
    folder = tmp_path / "c"
    first = run(folder, update=update, stop_at=26)
    assert first.epochs == [0, 1]
    second = run(folder, update=update, pservers=3, stop_at=7)
    assert second.epochs[0] == 1, "it goes on in the middle of it"
    assert second.totals[-1] == whole.totals[-1], "evaluated before the first epoch, and not again"
    third = run(folder, update=update, pservers=2)
    assert third.seen < 30
    assert third.totals[2] == whole.totals[2]
    assert model_of(tmp_path) == wanted


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [24, 4])
def test_the_bits_are_the_same_whatever_number_of_pservers_saved_and_goes_on(run, tmp_path, before, after, samples):
    data = {name: values[:samples] for name, values in DATA.items()}
    whole = run(epochs=3, data=data)
    wanted = model_of(tmp_path)
    folder = tmp_path / "c"
    run(folder, pservers=before, every=1, stop_at=3, data=data)
    rest = run(folder, pservers=after, data=data)
    assert rest.seen < whole.seen
    assert model_of(tmp_path) == wanted


def test_a_run_that_was_complete_saves_its_model_again_and_trains_nothing(run, tmp_path):
    run(tmp_path / "c")
    wanted = model_of(tmp_path)
    (tmp_path / "model" / "dense.safetensors").unlink()
    again = run(tmp_path / "c", epochs=3)
    assert (again.seen, again.epochs) == (0, [2])
    assert model_of(tmp_path) == wanted
    more = run(tmp_path / "c", epochs=4)
    assert more.epochs == [2, 3]


@pytest.mark.parametrize(("stop_at", "epochs"), [(26, 1), (26, 0), (None, 2), (None, 1)])
def test_a_script_with_fewer_epochs_than_the_job_is_refused_and_not_waited_for(run, tmp_path, stop_at, epochs):
    folder = tmp_path / "c"
    run(folder, stop_at=stop_at)
    at = 2 if stop_at is None else 1
    with pytest.raises(
        eg.errors.ConfigError, match=rf"save_model: the job is in epoch {at} already, .* to {at + 1} or"
    ):
        run(folder, epochs=epochs)


def test_the_end_of_a_script_in_an_epoch_makes_one_more_checkpoint_and_ends_the_job(run, tmp_path):
    folder = tmp_path / "c"
    first = run(folder, every=None, stop_at=5)
    assert serials(folder) == [0]
    network = first.session.driver._carrier
    _stop(lambda: first.session, lambda: network)
    assert serials(folder) == [0, 1]
    assert run(folder, every=None).seen == 48 - 4, "the fifth batch was half of a step"


def test_only_so_many_stay_and_the_best_one(run, tmp_path):
    run(tmp_path / "c", every=None, keep=1, best=lambda m: m["loss"])
    of_best = min((e.manifest.best, e.serial) for e in entries(Storage(tmp_path / "c")) if e.manifest.best is not None)
    assert serials(tmp_path / "c") == sorted({of_best[1], 3})


def test_a_warm_start_takes_the_rows_and_begins_with_epoch_0(run, tmp_path):
    run(tmp_path / "yesterday")
    trained = model_of(tmp_path)
    warm = run(tmp_path / "today", warm_start=str(tmp_path / "yesterday"), epochs=1, stop_at=1)
    assert warm.epochs == [0]
    manifest = entries(Storage(tmp_path / "today"))[0].manifest
    assert (manifest.rows("id"), manifest.progress.version) == (60, 0)
    run(tmp_path / "today", epochs=0)
    assert model_of(tmp_path) == trained


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(run, tmp_path):
    (tmp_path / "c").touch()
    with pytest.raises(eg.errors.ConfigError, match=r"cannot make checkpoints in .*/c: .*; give another place"):
        run(tmp_path / "c")


def test_a_checkpoint_of_another_model_is_refused_where_the_model_is_named(run, tmp_path):
    run(tmp_path / "c", epochs=1)
    with pytest.raises(eg.errors.ConfigError, match=r"checkpoint .*/c/checkpoint_\d+ is not of this model: its update"):
        run(tmp_path / "c", update="async")


def test_storage_that_fails_later_is_told_and_stops_nothing(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("evergrad.master.checkpoints.RETRY_S", 0.01)
    whole = run()
    wanted = model_of(tmp_path)
    folder = tmp_path / "c"

    original = Driver.start
    first = run(folder, every=1, stop_at=1)
    first.end()
    monkeypatch.setattr(Driver, "start", lambda self, flow: _lose(folder, tmp_path / "away") or original(self, flow))
    with caplog.at_level(logging.INFO):
        second = run(folder, every=1)
    assert model_of(tmp_path) == wanted
    assert second.totals == whole.totals
    failures = [r for r in caplog.records if "has failed" in r.getMessage()]
    assert failures
    assert {r.levelname for r in failures} == {"WARNING"}


def _lose(folder, away):
    if not away.exists():
        folder.rename(away)
        folder.touch()


def test_nothing_is_left_of_a_job_that_nobody_holds(tmp_path):
    job = Run(tmp_path / "c", stop_at=3).job
    assert (tmp_path / "c" / LOCK).exists()
    del job
    gc.collect()
