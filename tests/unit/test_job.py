"""The loops of a script, and what the job does around them, in one process."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import ConfigError, DataError
from evergrad.job.numerics import fingerprint

DATA = {"n": torch.arange(20), "x": torch.ones(20, 1)}


class Model(nn.Module):
    """`w` goes down by one each step with SGD of learning rate 1; row 0 of the table too."""

    def __init__(self):
        super().__init__()
        self.t = eg.Embedding("t", 1, init=eg.init_rows.zeros())
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self):
        return self.w + self.t(torch.tensor([0])).sum()


def begin(job, model=None):
    model = Model() if model is None else model
    return model, job.optimizer(model, dense=eg.SGD(lr=1.0), sparse=eg.SGD(lr=1.0))


def train_batch(model, optimizer):
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def numbers(job, model, optimizer, epochs=1, batch_size=4, data=DATA, **options):
    """The samples of each batch of each epoch."""
    found = []
    for _ in job.epochs(epochs):
        found.append([])
        for batch in job.batches(data, batch_size, **options):
            train_batch(model, optimizer)
            found[-1].append(batch["n"].tolist())
    return found


def steps_taken(job, model):
    return -job.evaluate(lambda batch: {"w": model.w}, {"x": torch.ones(1)}, 1)["w"]


# -- epochs and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches_per_step", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 4, 20, 100])
def test_every_sample_comes_once_an_epoch(new_job, batches_per_step, batch_size):
    job = new_job(update=eg.Sync(batches_per_step))
    for epoch in numbers(job, *begin(job), 2, batch_size):
        assert sorted(n for batch in epoch for n in batch) == list(range(20))
        assert max(map(len, epoch)) <= batch_size


def test_every_sample_comes_once_an_epoch_with_asynchronous_updates(new_job, pservers):
    job = new_job(pservers, eg.Async(batches_per_task=3))
    model, optimizer = begin(job)
    for epoch in numbers(job, model, optimizer, 2, 3):
        assert sorted(n for batch in epoch for n in batch) == list(range(20))
        assert [len(batch) for batch in epoch].count(2) == 1
    assert steps_taken(job, model) == 14


def test_each_epoch_has_an_order_of_its_own_that_the_seed_alone_decides(new_job):
    def orders(seed):
        job = new_job(seed=seed)
        return numbers(job, *begin(job), 2)

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    first, second = orders(1)
    assert first != second


def test_without_shuffle_samples_come_in_their_order(new_job):
    job = new_job()
    assert numbers(job, *begin(job), 2, 8, shuffle=False) == [[[*range(8)], [*range(8, 16)], [*range(16, 20)]]] * 2


def test_fewer_samples_than_batches_a_step_are_one_step(new_job, pservers):
    job = new_job(pservers, eg.Sync(8))
    model, optimizer = begin(job)
    found = numbers(job, model, optimizer, data={"n": torch.arange(3)})
    assert sorted(found[0]) == [[0], [1], [2]]
    assert steps_taken(job, model) == 1


@pytest.mark.parametrize("update", [eg.Sync(), eg.Sync(4), eg.Async()])
def test_one_sample_is_enough(new_job, pservers, update):
    job = new_job(pservers, update)
    model, optimizer = begin(job)
    assert numbers(job, model, optimizer, 3, data={"n": torch.tensor([5])}) == [[[5]]] * 3
    assert steps_taken(job, model) == 3


def test_the_mean_of_a_step_is_over_samples_and_not_over_batches(new_job, pservers):
    """7 samples are batches of 3 and 4."""
    job = new_job(pservers, eg.Sync(2))
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for batch in job.batches({"n": torch.arange(7.0)}, 4):
            optimizer.zero_grad()
            (batch["n"].mean() * model()).backward()
            optimizer.step()
    assert steps_taken(job, model) == pytest.approx(3.0)


def test_leaving_batches_ends_the_epoch_and_the_next_is_whole(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)
    seen = []
    for epoch in job.epochs(2):
        for batch in job.batches(DATA, 4):
            train_batch(model, optimizer)
            seen.append((epoch, len(batch["n"])))
            if epoch == 0 and len(seen) == 2:
                break
    assert seen == [(0, 4)] * 2 + [(1, 4)] * 5


def test_a_loop_over_batches_that_is_kept_and_not_ended_ends_with_its_epoch(new_job):
    job = new_job()
    model, optimizer = begin(job)
    kept = []
    for _ in job.epochs(3):
        kept.append(job.batches(DATA, 4))
        next(kept[-1])
        train_batch(model, optimizer)
    job.evaluate(lambda batch: {}, DATA, 20)
    assert [next(loop, None) for loop in kept] == [None] * 3


def test_batches_that_are_asked_for_and_never_read_do_no_harm(new_job):
    job = new_job()
    model, optimizer = begin(job)
    for epoch in job.epochs(2):
        loop = job.batches(DATA, 20)
        if epoch == 1:
            for _ in loop:
                train_batch(model, optimizer)
    assert steps_taken(job, model) == 1


def test_epochs_without_batches_are_legal(new_job):
    job = new_job()
    model, _ = begin(job)
    assert [(epoch, steps_taken(job, model)) for epoch in job.epochs(3)] == [(0, 0), (1, 0), (2, 0)]


def test_a_loop_that_is_left_at_a_batch_is_told_with_the_generation_of_that(new_job):
    job = new_job()
    model, optimizer = begin(job)
    for _ in job.epochs(5):
        for _ in job.batches(DATA, 4):
            train_batch(model, optimizer)
            break
        assert (job._session.done.generation, job._session.done.last.contributed) == (1, True)
        break
    assert (job._session.done.generation, job._session.done.left_until) == (1, 5)
    for _ in job.epochs(1):
        break
    assert job._session.done.generation is None


@pytest.mark.parametrize("rule", [eg.Sync(), eg.LocalSGD(2)])
def test_a_loop_that_is_left_is_told_with_the_version_that_has_its_last_step(new_job, rule):
    job = new_job(update=rule)
    model, optimizer = begin(job)
    told = []
    for epoch in job.epochs(2):
        for _ in job.batches(DATA, 4):
            if epoch == 1:
                break
            train_batch(model, optimizer)
            break
        told.append(job._session.done.version)
    assert told == [1, 1]


def test_leaving_epochs_ends_them_and_a_further_loop_goes_on(new_job):
    job = new_job()
    model, optimizer = begin(job)
    for _ in job.epochs(5):
        for _ in job.batches(DATA, 20):
            train_batch(model, optimizer)
        break
    assert steps_taken(job, model) == 1
    assert list(job.epochs(2)) == [0, 1]
    assert numbers(job, model, optimizer, 2, 20) != []
    assert steps_taken(job, model) == 3


def test_a_second_loop_over_epochs_counts_from_0_and_has_orders_of_its_own(new_job):
    job = new_job()
    model, optimizer = begin(job)
    first = numbers(job, model, optimizer, 1)
    second = numbers(job, model, optimizer, 1)
    assert first != second
    assert steps_taken(job, model) == 10


def test_no_epochs_are_none(new_job):
    job = new_job()
    begin(job)
    assert list(job.epochs(0)) == []
    assert list(job.epochs(1)) == [0]


@pytest.mark.parametrize("count", [-1, 1.0, "3", None])
def test_a_number_of_epochs_that_is_none_is_refused(new_job, count):
    job = new_job()
    begin(job)
    with pytest.raises(ConfigError, match="the number of epochs is"):
        list(job.epochs(count))


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None, "8"])
def test_a_batch_size_that_is_none_is_refused(new_job, batch_size):
    job = new_job()
    begin(job)
    with pytest.raises(ConfigError, match="batch_size is"):
        job.evaluate(lambda batch: {}, DATA, batch_size)
    for _ in job.epochs(1):
        with pytest.raises(ConfigError, match="batch_size is"):
            job.batches(DATA, batch_size)


def test_loops_in_wrong_places_are_refused_with_what_to_write(new_job):
    job = new_job()
    with pytest.raises(ConfigError, match=r"needs a model: call job.optimizer\(model, ...\) first"):
        next(job.epochs(1))
    begin(job)
    with pytest.raises(ConfigError, match=r"batches\(\) outside job.epochs\(\); write: for epoch in"):
        job.batches(DATA, 4)
    for _ in job.epochs(1):
        with pytest.raises(ConfigError, match=r"epochs\(\) inside job.epochs\(\)"):
            next(job.epochs(1))
        job.batches(DATA, 4)
        with pytest.raises(ConfigError, match="called twice in one epoch"):
            job.batches(DATA, 4)


def test_evaluating_and_saving_inside_batches_is_refused(new_job, tmp_path):
    job = new_job()
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for _ in job.batches(DATA, 20):
            with pytest.raises(ConfigError, match=r"job.evaluate\(\) inside job.batches\(\): call it between epochs"):
                job.evaluate(lambda batch: {}, DATA, 4)
            with pytest.raises(ConfigError, match=r"job.save_model\(\) inside job.batches\(\)"):
                job.save_model(tmp_path / "model")
            train_batch(model, optimizer)
    assert steps_taken(job, model) == 1


def test_a_step_is_seen_by_the_next_batch_and_only_when_it_is_whole(new_job, pservers):
    job = new_job(pservers, eg.Sync(2))
    model, optimizer = begin(job)
    seen = []
    for _ in job.epochs(1):
        for _ in job.batches(DATA, 5):
            seen.append((model.w.item(), model.t(torch.tensor([0])).item()))
            train_batch(model, optimizer)
    assert seen == [(0, 0), (0, 0), (-1, -1), (-1, -1)]


# -- evaluate ----------------------------------------------------------------------------------------------------------


def test_evaluate_adds_up_numbers_and_arrays_and_means_and_areas_over_all_batches(new_job, pservers):
    job = new_job(pservers)
    begin(job)
    labels = (np.arange(20) % 3 == 0).astype(np.float32)

    def metrics(batch):
        n = batch["n"].double()
        return {
            "count": len(n),
            "array": np.array([1, 2]),
            "tensor": torch.ones(2, 2) * n.sum(),
            "mean": eg.metrics.mean(n),
            "weighted": eg.metrics.mean(n.mean(), len(n)),
            "auc": eg.metrics.auc(n, batch["label"]),
        }

    found = job.evaluate(metrics, {"n": DATA["n"], "label": labels}, batch_size=3)
    assert (found["count"], found["array"].tolist(), found["tensor"].tolist()) == (20, [7, 14], [[190] * 2] * 2)
    assert (found["mean"], found["weighted"]) == (9.5, pytest.approx(9.5))
    positive, negative = np.arange(20)[labels == 1], np.arange(20)[labels == 0]
    assert found["auc"] == (positive[:, None] > negative).mean()


def test_evaluate_reads_all_samples_once_in_order_without_gradients_in_eval_mode(new_job):
    job = new_job()
    model, _ = begin(job)
    seen = []

    def look(batch):
        seen.extend(batch["n"].tolist())
        assert not torch.is_grad_enabled()
        assert not model.training
        return {}

    assert job.evaluate(look, DATA, 7) == {}
    assert seen == list(range(20))
    assert torch.is_grad_enabled()


def test_modes_of_all_modules_are_as_before_after_evaluate(new_job):
    job = new_job()
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.BatchNorm1d(1))
    model[1].eval()
    begin(job, model)
    job.evaluate(lambda batch: {}, DATA, 20)
    assert [m.training for m in model] == [True, False, True]
    with pytest.raises(ZeroDivisionError):
        job.evaluate(lambda batch: {"x": 1 / 0}, DATA, 20)
    assert [m.training for m in model] == [True, False, True]


def test_evaluate_before_training_sees_the_initial_values_and_changes_nothing(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)
    assert steps_taken(job, model) == 0
    numbers(job, model, optimizer)
    assert steps_taken(job, model) == steps_taken(job, model) == 5


def test_evaluate_can_be_called_often_between_and_after_epochs(new_job):
    job = new_job()
    model, optimizer = begin(job)
    found = []
    for _ in job.epochs(2):
        found.append(steps_taken(job, model))
        for _ in job.batches(DATA, 20):
            train_batch(model, optimizer)
        found += [steps_taken(job, model), steps_taken(job, model)]
    assert [*found, steps_taken(job, model)] == [0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("result", [None, 1.0, [1], "text"])
def test_a_function_that_returns_no_dict_is_refused(new_job, result):
    job = new_job()
    model, _ = begin(job)
    with pytest.raises(ConfigError, match=f"returned a {type(result).__name__}; return a dict of metrics by name"):
        job.evaluate(lambda batch: result, DATA, 4)
    assert steps_taken(job, model) == 0


def test_metrics_that_do_not_add_up_are_refused_with_their_names(new_job):
    job = new_job()
    begin(job)
    with pytest.raises(ConfigError, match=r"batches returned different metrics, \['a8'\] and \['a4'\]"):
        job.evaluate(lambda batch: {f"a{len(batch['n'])}": 1}, DATA, 8)


def test_a_metric_that_is_no_number_is_refused(new_job):
    job = new_job()
    model, _ = begin(job)
    with pytest.raises(DataError, match="neither a number nor an array"):
        job.evaluate(lambda batch: {"m": "high"}, DATA, 4)
    assert steps_taken(job, model) == 0


# -- random numbers ----------------------------------------------------------------------------------------------------


def random_numbers(job, batches_per_step_or_epochs=2):
    model, optimizer = begin(job)
    found = []
    for _ in job.epochs(batches_per_step_or_epochs):
        for _ in job.batches(DATA, 4):
            drawn = (torch.rand(3).tolist(), np.random.rand(2).tolist(), random.random(), nn.Dropout()(torch.ones(8)))
            found.append((*drawn[:3], drawn[3].tolist()))
            train_batch(model, optimizer)
    return found


def test_random_numbers_inside_a_batch_follow_from_the_seed_whatever_ran_before(new_job, pservers):
    wanted = random_numbers(new_job())
    torch.rand(17)
    random.random()
    assert random_numbers(new_job(pservers)) == wanted
    assert random_numbers(new_job(seed=1)) != wanted
    assert len({str(drawn) for drawn in wanted}) == len(wanted)


def test_a_network_with_dropout_and_batch_norm_has_the_same_bits_for_any_number_of_pservers(new_job, pservers):
    def trained(pservers):
        job = new_job(pservers, eg.Sync(3))
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = job.optimizer(model, dense=eg.Adam(lr=0.1))
        data = {"x": torch.randn(50, 3, generator=torch.Generator().manual_seed(1))}
        for _ in job.epochs(2):
            for batch in job.batches(data, 7):
                optimizer.zero_grad()
                model(batch["x"]).square().mean().backward()
                optimizer.step()
        job.evaluate(lambda batch: {}, data, 50)
        return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}

    assert trained(pservers) == trained(1)


class Augmented(torch.utils.data.Dataset):
    """Random numbers of all kinds are added to each sample."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"n": i, "x": torch.rand(2) + random.random() + np.random.rand()}


def test_a_torch_dataset_that_augments_at_random_gives_the_same_bits_in_every_run(new_job, pservers):
    def samples(pservers, seed=0):
        job = new_job(pservers, seed=seed)
        model, optimizer = begin(job)
        found = []
        for _ in job.epochs(2):
            for batch in job.batches(eg.data.Map(Augmented()), 6):
                found.append((batch["n"].tolist(), batch["x"].tolist()))
                train_batch(model, optimizer)
        return found

    assert samples(pservers) == samples(1)
    assert samples(pservers, 1) != samples(1)
    assert len({str(batch) for batch in samples(1)}) == 8


def test_a_batch_lies_in_memory_of_torchs(new_job):
    """Products of torch differ in the last bit with the alignment of what they read."""
    job = new_job()
    model, optimizer = begin(job)
    columns = {"x": np.random.default_rng(0).random((20, 3), np.float32), "n": np.arange(20)}
    for _ in job.epochs(1):
        for batch in job.batches(columns, 3):
            assert [value.data_ptr() % 64 for value in batch.values()] == [0, 0]
            train_batch(model, optimizer)


# -- report and leader -------------------------------------------------------------------------------------------------


def test_a_report_outside_of_batches_is_printed_and_one_inside_is_averaged(new_job, capsys):
    job = new_job()
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for batch in job.batches({"n": torch.arange(6)}, 4, shuffle=False):
            job.report({"loss": batch["n"].double().mean()})
            job.report({"other": 1})
            train_batch(model, optimizer)
        job.report({"auc": 0.5, "n": torch.tensor(3)})
    assert capsys.readouterr().out == "epoch 0: auc 0.5  n 3\n"
    status = job._session.driver._carrier.master.status(0, 0.0)
    assert status.live == {"loss": pytest.approx(2.5), "other": 1.0}
    assert status.reported == {0: {"auc": 0.5, "n": 3.0}}


def test_the_only_trainer_is_the_leader(new_job):
    job = new_job()
    assert job.is_leader()
    begin(job)
    assert job.is_leader()


# -- what the script or the data raises --------------------------------------------------------------------------------


def test_an_exception_inside_a_batch_goes_through_and_the_job_can_go_on(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)

    def fail():
        for _ in job.epochs(3):
            for number, _ in enumerate(job.batches(DATA, 4)):
                train_batch(model, optimizer)
                if number == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    taken = steps_taken(job, model)
    assert taken == 3, "the batch whose step was taken counts"
    numbers(job, model, optimizer)
    assert steps_taken(job, model) == taken + 5


class Broken(Augmented):
    def __init__(self):
        self.reads = 0

    def __getitem__(self, i):
        self.reads += 1
        if self.reads == 6:
            raise OSError("disk")
        return {"n": i}


def test_what_a_dataset_raises_goes_through_and_the_next_epoch_is_whole(new_job):
    job = new_job()
    model, optimizer = begin(job)
    broken, seen = Broken(), []
    for _ in job.epochs(2):
        try:
            for batch in job.batches(broken, 4):
                seen += batch["n"].tolist()
                train_batch(model, optimizer)
        except OSError:
            seen.clear()
    assert sorted(seen) == list(range(20))


def test_a_model_that_raises_in_evaluate_can_be_corrected_and_evaluated_again(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)

    def fails_later(batch):
        if batch["n"][0] > 5:
            raise ZeroDivisionError
        return {"n": 1}

    for fn in (lambda batch: {"n": 1 / 0}, fails_later):
        with pytest.raises(ZeroDivisionError):
            job.evaluate(fn, DATA, 4)
        assert job.evaluate(lambda batch: {"n": len(batch["n"])}, DATA, 4) == {"n": 20}
    numbers(job, model, optimizer)
    assert steps_taken(job, model) == 5


def test_data_that_cannot_be_used_is_refused_and_other_data_taken(new_job):
    job = new_job()
    model, optimizer = begin(job)
    with pytest.raises(DataError, match="cannot be read by sample number"):
        job.evaluate(lambda batch: {}, 5, 4)
    for _ in job.epochs(2):
        with pytest.raises(DataError, match="holds strings"):
            job.batches({"n": ["a", "b"]}, 4)
    numbers(job, model, optimizer)
    assert steps_taken(job, model) == 5


def test_an_interrupt_in_a_notebook_leaves_a_job_that_goes_on(new_job):
    job = new_job()
    model, optimizer = begin(job)

    def interrupted(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.evaluate(interrupted, DATA, 4)
    with pytest.raises(KeyboardInterrupt):
        [interrupted(batch) for _ in job.epochs(1) for batch in job.batches(DATA, 4)]
    numbers(job, model, optimizer)
    assert steps_taken(job, model) == 5


# -- init --------------------------------------------------------------------------------------------------------------


def test_two_jobs_one_after_the_other_know_nothing_of_each_other():
    def result():
        job = eg.init(seed=3)
        weights = nn.Linear(2, 2).weight.tolist()
        model, optimizer = begin(job)
        return weights, numbers(job, model, optimizer, 2), steps_taken(job, model)

    assert result() == result()


def test_two_jobs_can_take_turns(new_job):
    jobs = [new_job(seed=1), new_job(seed=2)]
    bound = [begin(job) for job in jobs]
    loops = [job.epochs(1) for job in jobs]
    for loop in loops:
        next(loop)
    for _ in zip(*(job.batches(DATA, 4) for job in jobs), strict=True):
        for model, optimizer in bound:
            train_batch(model, optimizer)
    assert [next(loop, None) for loop in loops] == [None, None]
    assert [steps_taken(job, model) for job, (model, _) in zip(jobs, bound, strict=True)] == [5, 5]


def test_init_sets_threads_and_seeds_so_that_every_process_makes_the_same_model():
    threads = torch.get_num_threads()
    try:
        found = []
        for _ in range(2):
            eg.init(seed=7, threads=1)
            found.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
        assert found[0] == found[1]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"update": eg.Sync(0)}, "Sync: batches_per_step is 0; give a whole number of one or more"),
        ({"update": eg.Sync(2.0)}, "Sync: batches_per_step is 2.0"),
        ({"update": eg.Async(0)}, "Async: batches_per_task is 0"),
        ({"update": eg.Sync(1, backup_after=0)}, "backup_after is 0; give seconds above zero, or None"),
        ({"update": "sync"}, "update is 'sync'; give eg.Sync"),
        ({"update": eg.Sync}, "update is <class .*Sync'>; give eg.Sync"),
        ({"threads": 0}, "threads is 0; give a whole number of one or more"),
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
        ({"seed": 2**63}, "seed is 9223372036854775808; give one of at most 63 bits"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
    ],
)
def test_init_says_what_is_wrong(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        eg.init(**options)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), np.int64(5)])
def test_any_whole_number_is_a_seed(seed):
    job = eg.init(seed=seed)
    assert numbers(job, *begin(job))


def test_the_fingerprint_of_the_machine_names_what_bits_depend_on():
    assert fingerprint() == fingerprint()
    assert f"torch {torch.__version__}" in fingerprint()


def test_the_fingerprint_tells_other_threads_and_tiny_numbers_rounded_to_zero():
    before = fingerprint()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert fingerprint() != before
        torch.set_num_threads(threads)
        assert torch.set_flush_denormal(True)
        assert fingerprint() != before
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    assert fingerprint() == before


def test_a_script_in_one_process_leaves_nothing_to_shut_down():
    """No thread, socket or process keeps it alive, and nothing is printed on the way."""
    code = (
        "import torch, evergrad as eg\n"
        "job = eg.init(); m = torch.nn.Linear(1, 1); o = job.optimizer(m, dense=eg.SGD())\n"
        "for e in job.epochs(1):\n"
        "    for b in job.batches({'x': torch.ones(4, 1)}, 2):\n"
        "        o.zero_grad(); m(b['x']).sum().backward(); o.step()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
