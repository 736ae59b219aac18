"""`eg.Embedding` and `eg.EmbeddingBag` against torch's, with the same rows put into both."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import evergrad as eg
from evergrad.errors import ConfigError
from evergrad.job.rows import BatchRows
from evergrad.kernels.initial import initial_rows, table_seed

DIM = 5
MIN, MAX = -(2**63), 2**63 - 1
KEYS = [MIN, MIN + 1, -7, -1, 0, 1, 2, 9, 2**31, -(2**31), MAX - 1, MAX]


def rows_of(keys):
    return initial_rows(np.asarray(keys, np.int64), DIM, eg.init_rows.normal(), table_seed(0, "t"))


def wanted(rows, batch):
    """The keys that a batch is known to need, by table."""
    rows.number(batch)
    return rows.wanted()


def numbers_of(modules):
    return {name: number for number, name in enumerate(dict.fromkeys(m.table for m in modules))}


def source(*modules, training=True):
    rows = BatchRows(modules, numbers_of(modules), lambda table, keys: rows_of(keys), training)
    for module in modules:
        module.source = rows
    return rows


def gradients(rows, table=0):
    """Key -> gradient."""
    found = [g for g in rows.gradients() if g.table == table]
    return {int(k): v for g in found for k, v in zip(g.keys, g.grads, strict=True)}


def twin(ids, padding_idx=None):
    """The keys of a torch table with the same rows, its weight, the ids as row numbers, and the padding's number."""
    keys = sorted({*ids.reshape(-1).tolist(), *([] if padding_idx is None else [padding_idx])})
    weight = torch.from_numpy(rows_of(keys))
    padding = None if padding_idx is None else keys.index(padding_idx)
    if padding is not None:
        weight[padding] = 0
    index = torch.tensor([keys.index(i) for i in ids.reshape(-1).tolist()], dtype=torch.int64).reshape(ids.shape)
    return keys, weight, index, padding


def check(module, torch_module, ids, *more, padding_idx=None):
    """Both give the same values, to the bit, and for the same gradient from above the same gradients.

    What torch sums up in a bag's gradient depends in the last bit on where in the weight a row is.
    """
    rows = source(module)
    keys, weight, index, padding = twin(ids, padding_idx)
    other = torch_module(weight.shape[0], padding)
    with torch.no_grad():
        other.weight.copy_(weight)
    ours, theirs = module(ids, *more), other(index, *more)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)
    above = torch.arange(ours.numel(), dtype=torch.float32).reshape(ours.shape).sin()
    if ours.requires_grad:
        (ours * above).sum().backward()
    if theirs.requires_grad:
        (theirs * above).sum().backward()
    found = gradients(rows)
    wanted = {} if other.weight.grad is None else dict(zip(keys, other.weight.grad.numpy(), strict=True))
    met = set(ids.reshape(-1).tolist()) - {padding_idx}
    assert set(found) == met
    for key in met:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-6, atol=1e-6)


def embedding(padding_idx=None):
    return eg.Embedding("t", DIM, padding_idx=padding_idx)


def torch_embedding(rows, padding):
    return nn.Embedding(rows, DIM, padding_idx=padding)


def bag(mode, padding_idx=None, **options):
    ours = eg.EmbeddingBag("t", DIM, mode=mode, padding_idx=padding_idx, **options)
    return ours, lambda rows, padding: nn.EmbeddingBag(rows, DIM, mode=mode, padding_idx=padding, **options)


# -- Embedding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 3), (0,), (0, 4), (3, 0)])
def test_an_embedding_is_torchs_for_ids_of_any_shape(shape):
    ids = np.random.default_rng(1).choice(np.array(KEYS), shape)
    check(embedding(), torch_embedding, torch.as_tensor(ids, dtype=torch.int64))


def test_all_int64_keys_are_legal_and_different():
    check(embedding(), torch_embedding, torch.tensor(KEYS))
    assert len({row.tobytes() for row in rows_of(KEYS)}) == len(KEYS)


def test_gradients_of_an_id_that_stands_often_are_summed():
    check(embedding(), torch_embedding, torch.tensor([[5, 5, MIN], [MIN, 5, 6]]))


def test_ids_may_be_int32():
    check(embedding(), torch_embedding, torch.tensor([3, -3, 3, 2**31 - 1, -(2**31)], dtype=torch.int32))


def test_ids_need_not_be_contiguous():
    check(embedding(), torch_embedding, torch.arange(12).reshape(3, 4).T[::2])


@pytest.mark.parametrize("padding_idx", [0, -1, 5, MIN, MAX])
def test_padding_reads_as_zeros_and_is_not_trained(padding_idx):
    ids = torch.tensor([[padding_idx, 5], [0, padding_idx], [7, MIN]])
    check(embedding(padding_idx), torch_embedding, ids, padding_idx=padding_idx)


def test_a_batch_of_nothing_but_padding_trains_nothing():
    check(embedding(0), torch_embedding, torch.zeros(3, 2, dtype=torch.int64), padding_idx=0)


def test_a_parameter_of_the_model_can_be_multiplied_with_rows():
    module, scale = eg.Embedding("t", DIM), nn.Parameter(torch.tensor(2.0))
    rows = source(module)
    (module(torch.tensor([3, 4])) * scale).sum().backward()
    assert all((grad == 2).all() for grad in gradients(rows).values())
    assert np.isclose(scale.grad.item(), rows_of([3, 4]).sum(), rtol=1e-5)


# -- EmbeddingBag ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (4, 1), (0, 3)])
def test_bags_of_equal_length_are_torchs(mode, shape):
    check(*bag(mode), torch.from_numpy(np.random.default_rng(2).choice(np.array(KEYS), shape)))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("offsets", [[0], [0, 3], [0, 0, 2, 2, 8], [0, 8, 8]])
def test_bags_with_offsets_are_torchs_also_where_they_are_empty(mode, offsets):
    check(*bag(mode), torch.tensor([1, MAX, 1, -1, MIN, 0, 7, 7]), torch.tensor(offsets))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_offsets_may_include_the_last(mode):
    ids = torch.tensor([1, 1, -1, 4, 4])
    check(*bag(mode, include_last_offset=True), ids, torch.tensor([0, 2, 2, 5]))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("offsets", [[], [0], [0, 0, 0]])
def test_bags_without_any_id_are_zeros(mode, offsets):
    ours, _ = bag(mode)
    rows = source(ours)
    out = ours(torch.zeros(0, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(len(offsets), DIM))
    assert gradients(rows) == {}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_is_left_out_of_a_bag_and_of_its_mean(mode):
    ids = torch.tensor([[0, 5, 0], [0, 0, 0], [5, 6, 7]])
    check(*bag(mode, padding_idx=0), ids, padding_idx=0)
    flat = torch.tensor([0, 5, 0, 0, 6])
    check(*bag(mode, padding_idx=0), flat, torch.tensor([0, 2, 4, 4]), padding_idx=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
def test_ids_and_offsets_of_a_bag_may_be_int32(dtype, offset_dtype):
    check(*bag("sum"), torch.tensor([3, 3, -4], dtype=dtype), torch.tensor([0, 2], dtype=offset_dtype))


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_weights_per_sample_and_their_gradient_are_torchs(padding_idx):
    ids = torch.tensor([[3, 4], [3, 3], [MIN, MAX]])
    weights = torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_()
    other_weights = weights.detach().clone().requires_grad_()
    module = eg.EmbeddingBag("t", DIM, mode="sum", padding_idx=padding_idx)
    rows = source(module)
    keys, weight, index, padding = twin(ids, padding_idx)
    weight.requires_grad_()
    theirs = nn.functional.embedding_bag(
        index, weight, mode="sum", per_sample_weights=other_weights, padding_idx=padding
    )
    ours = module(ids, per_sample_weights=weights)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(weights.grad, other_weights.grad)
    wanted = dict(zip(keys, weight.grad.numpy(), strict=True))
    assert all(np.allclose(grad, wanted[key]) for key, grad in gradients(rows).items())


@given(st.data())
def test_any_bags_are_torchs(data):
    lists = data.draw(st.lists(st.lists(st.sampled_from(KEYS), max_size=4), min_size=1, max_size=5))
    padding_idx = data.draw(st.sampled_from([None, *KEYS]))
    mode = data.draw(st.sampled_from(["sum", "mean"]))
    ids = torch.tensor([key for keys in lists for key in keys], dtype=torch.int64)
    starts = np.cumsum([0, *map(len, lists)])
    last = data.draw(st.booleans())
    offsets = torch.from_numpy(starts if last else starts[:-1])
    if ids.numel():
        check(*bag(mode, padding_idx, include_last_offset=last), ids, offsets, padding_idx=padding_idx)


# -- rows pulled ahead -------------------------------------------------------------------------------------------------


def pulled_ahead(batch, *modules):
    """The rows of a batch, pulled ahead, and the list of what is pulled later."""
    later = []

    def pull(table, keys):
        later.append((table, keys.tolist()))
        return rows_of(keys)

    rows = BatchRows(modules, numbers_of(modules), pull, True)
    rows.take([rows_of(keys) for _, keys in wanted(rows, batch)])
    for module in modules:
        module.source = rows
    return rows, later


def test_rows_of_a_batch_are_pulled_ahead_and_not_again():
    module = embedding()
    batch = {"t": torch.tensor([[4, 4], [MIN, 9]])}
    _, later = pulled_ahead(batch, module)
    assert torch.equal(module(batch["t"]), torch.from_numpy(rows_of([4, 4, MIN, 9])).reshape(2, 2, DIM))
    module(batch["t"].reshape(-1))
    module(batch["t"][:1])
    module(batch["t"].T)
    module(torch.tensor([9, 4]))
    assert later == []


def test_ids_met_only_in_forward_are_pulled_there_and_only_the_missing():
    module = embedding()
    rows, later = pulled_ahead({"t": torch.tensor([4, 5])}, module)
    out = module(torch.tensor([5, 6, 4, 7]))
    assert later == [(0, [6, 7])]
    assert torch.equal(out, torch.from_numpy(rows_of([5, 6, 4, 7])))
    (out * torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    assert {key: grad[0] for key, grad in gradients(rows).items()} == {5: 1, 6: 2, 4: 3, 7: 4}


def test_rows_pulled_ahead_but_not_used_get_no_gradient():
    module = embedding()
    batch = {"t": torch.tensor([1, 2, 3])}
    rows, _ = pulled_ahead(batch, module)
    module(batch["t"][1:]).sum().backward()
    assert set(gradients(rows)) == {2, 3}


def test_rows_read_without_grad_get_no_gradient():
    module = embedding()
    rows, _ = pulled_ahead({}, module)
    with torch.no_grad():
        module(torch.tensor([1, 2]))
    module(torch.tensor([2, 3])).sum().backward()
    assert set(gradients(rows)) == {2, 3}


def test_ids_changed_in_place_after_they_were_pulled_ahead_read_their_new_rows():
    module = embedding()
    batch = {"t": torch.tensor([1, 2, 3])}
    rows, _ = pulled_ahead(batch, module)
    batch["t"][0] = 3
    batch["t"].add_(1)
    out = module(batch["t"])
    assert torch.equal(out, torch.from_numpy(rows_of([4, 3, 4])))
    out.sum().backward()
    assert {key: grad[0] for key, grad in gradients(rows).items()} == {3: 1, 4: 2}


@pytest.mark.parametrize("change", [lambda t: t.numpy().__setitem__(0, 3), lambda t: t.data.__setitem__(0, 3)])
def test_ids_changed_behind_torchs_back_read_their_new_rows(change):
    module = embedding()
    batch = {"t": torch.tensor([1, 2, 3])}
    pulled_ahead(batch, module)
    change(batch["t"])
    assert torch.equal(module(batch["t"]), torch.from_numpy(rows_of([3, 2, 3])))


def test_ids_of_another_tensor_at_the_same_place_read_their_own_rows():
    module = embedding()
    batch = {"t": torch.tensor([1, 2, 3])}
    pulled_ahead(batch, module)
    for i in range(20):
        del batch["t"]
        batch["t"] = torch.tensor([i, i + 1, i + 2])
        assert torch.equal(module(batch["t"]), torch.from_numpy(rows_of([i, i + 1, i + 2])))


def test_int32_ids_viewed_as_int64_are_no_mix_up():
    module = embedding()
    batch = {"t": torch.tensor([1, 2, 3, 4], dtype=torch.int32)}
    pulled_ahead(batch, module)
    view = batch["t"].view(torch.int64)
    assert torch.equal(module(view), torch.from_numpy(rows_of(view.numpy())))
    assert torch.equal(module(batch["t"]), torch.from_numpy(rows_of([1, 2, 3, 4])))


def test_two_modules_share_a_table_and_pull_the_rows_of_both_features_at_once():
    a, b = eg.Embedding("t", DIM, feature="seen"), eg.Embedding("t", DIM, feature="next")
    batch = {"seen": torch.tensor([1, 2]), "next": torch.tensor([2, 3])}
    rows, later = pulled_ahead(batch, a, b)
    (a(batch["seen"]).sum() + 10 * b(batch["next"]).sum()).backward()
    assert later == []
    assert {key: grad[0] for key, grad in gradients(rows).items()} == {1: 1, 2: 11, 3: 10}


def test_padding_of_one_module_is_an_id_like_any_other_to_the_other():
    a, b = eg.Embedding("t", DIM, padding_idx=0), eg.Embedding("t", DIM, feature="u")
    batch = {"t": torch.tensor([0, 1]), "u": torch.tensor([0, 1])}
    rows, _ = pulled_ahead(batch, a, b)
    assert torch.equal(a(batch["t"])[0], torch.zeros(DIM))
    assert torch.equal(b(batch["u"])[0], torch.from_numpy(rows_of([0]))[0])
    (a(batch["t"]).sum() + b(batch["u"]).sum()).backward()
    assert {key: grad[0] for key, grad in gradients(rows).items()} == {0: 1, 1: 2}


def test_padding_is_not_pulled():
    module = embedding(0)
    rows = BatchRows([module], {"t": 0}, lambda table, keys: rows_of(keys), True)
    assert [keys.tolist() for _, keys in wanted(rows, {"t": torch.tensor([0, 3, 0])})] == [[3]]


def test_two_tables_are_kept_apart():
    a, b = eg.Embedding("t", DIM), eg.Embedding("other", DIM)
    batch = {"t": torch.tensor([1, 2]), "other": torch.tensor([2, 3])}
    rows, _ = pulled_ahead(batch, a, b)
    (a(batch["t"]).sum() + 10 * b(batch["other"]).sum()).backward()
    assert {key: grad[0] for key, grad in gradients(rows, 0).items()} == {1: 1, 2: 1}
    assert {key: grad[0] for key, grad in gradients(rows, 1).items()} == {2: 10, 3: 10}


@pytest.mark.parametrize(
    "batch",
    [
        {"t": "text"},
        {"t": torch.tensor([1.0])},
        {"t": None},
        {"t": ()},
        {"t": [1, 2]},
        {"other": torch.tensor([1])},
        torch.tensor([1]),
        [torch.tensor([1])],
        None,
        {"t": torch.zeros(0, dtype=torch.int64)},
    ],
)
def test_a_batch_without_ids_under_the_features_name_pulls_nothing_ahead(batch):
    module = embedding()
    _, later = pulled_ahead(batch, module)
    assert torch.equal(module(torch.tensor([8])), torch.from_numpy(rows_of([8])))
    assert later == [(0, [8])]


def test_the_ids_of_a_bag_may_be_the_first_of_a_tuple():
    module = eg.EmbeddingBag("t", DIM)
    batch = {"t": (torch.tensor([1, 2]), torch.tensor([0]))}
    _, later = pulled_ahead(batch, module)
    module(*batch["t"])
    assert later == []


def test_gradients_go_with_zero_grad_and_come_anew():
    module = embedding()
    rows, _ = pulled_ahead({}, module)
    module(torch.tensor([1])).sum().backward()
    rows.zero_grad()
    assert gradients(rows) == {}
    module(torch.tensor([2])).sum().backward()
    assert gradients(rows)[2].tolist() == [1] * DIM


# -- in a job: rows and gradients on 1, 2 and 3 pservers ---------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = eg.Embedding("t", DIM, **options)

    def forward(self, ids):
        return self.table(ids)


def saved_rows(job, tmp_path):
    """Key -> row, of all rows there are."""
    from evergrad.checkpoint.model import Model

    job.save_model(tmp_path / "model")
    return dict(zip(*(a.tolist() for a in Model(tmp_path / "model").table("t")), strict=True))


def train(job, model, batches):
    """One step of SGD with learning rate 1 for each batch of ids: each is a dataset of one step."""
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=1.0))
    for epoch in job.epochs(len(batches)):
        ids = torch.tensor(batches[epoch])
        for batch in job.batches({"t": ids}, batch_size=len(ids), shuffle=False):
            optimizer.zero_grad()
            yield batch
            optimizer.step()


def test_rows_over_the_whole_range_of_keys_start_as_their_initializer_and_are_trained(new_job, pservers, tmp_path):
    job, model = new_job(pservers), Sum()
    for batch in train(job, model, [KEYS, KEYS]):
        model(batch["t"]).sum().backward()
    found = saved_rows(job, tmp_path)
    assert sorted(found) == sorted(KEYS)
    for key, row in zip(KEYS, rows_of(KEYS), strict=True):
        assert np.array_equal(np.float32(found[key]), (row - np.float32(1)) - np.float32(1))


def test_only_rows_that_were_used_with_a_gradient_are_made(new_job, pservers, tmp_path):
    job, model = new_job(pservers), Sum(padding_idx=0)
    for batch in train(job, model, [[0, 1, 2, 3], [4, 5, 6, 0]]):
        used = batch["t"][:2]
        with torch.no_grad():
            model(batch["t"])
        (model(used).sum() + model(torch.tensor([100])).sum()).backward()
    job.evaluate(lambda batch: {"sum": model(batch["t"]).sum()}, {"t": np.arange(50, 60)}, 5)
    assert sorted(saved_rows(job, tmp_path)) == [1, 4, 5, 100]


def test_duplicates_in_a_batch_are_summed_before_the_rule(new_job, pservers, tmp_path):
    job, model = new_job(pservers), Sum()
    for batch in train(job, model, [[7, 7, 7, -7]]):
        model(batch["t"]).sum().backward()
    found = saved_rows(job, tmp_path)
    assert np.array_equal(np.float32(found[7]), rows_of([7])[0] - np.float32(3))
    assert np.array_equal(np.float32(found[-7]), rows_of([-7])[0] - np.float32(1))


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "\0", 3, None])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="is no name for a table"):
        eg.Embedding(name, 4)


@pytest.mark.parametrize("dim", [0, -1, 2.0, "4", None, True])
def test_a_dim_that_is_none_is_refused(dim):
    with pytest.raises(ConfigError, match="dim is"):
        eg.Embedding("t", dim)


def test_a_mode_or_an_answer_for_unseen_keys_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="mode is 'max'; give one of sum, mean"):
        eg.EmbeddingBag("t", 4, mode="max")
    with pytest.raises(ConfigError, match="unseen is 'ones'; give one of zeros, initializer"):
        eg.Embedding("t", 4, unseen="ones")


@pytest.mark.parametrize("kind", [eg.Embedding, eg.EmbeddingBag])
@pytest.mark.parametrize(
    ("option", "value"),
    [("min_count", 0), ("min_count", 1.0), ("min_count", None), ("ttl", 0), ("ttl", True), ("max_rows", -1)],
)
def test_a_policy_that_is_none_is_refused(kind, option, value):
    with pytest.raises(ConfigError, match=rf"'t': {option} is {value}; give a whole number of one or more"):
        kind("t", 4, **{option: value})


@pytest.mark.parametrize("kind", [eg.Embedding, eg.EmbeddingBag])
def test_evicting_by_an_order_there_is_not_is_refused(kind):
    with pytest.raises(ConfigError, match=r"evict is 'oldest'; give one of recent, count"):
        kind("t", 4, evict="oldest")


def test_the_policy_holds_in_a_job_with_any_number_of_pservers(new_job, pservers, tmp_path):
    job, model = new_job(pservers), Sum(min_count=2, ttl=3)
    for batch in train(job, model, [[1, 2], [1, 3], [3, 3], [3, 4], [3, 5], [3, 5], [6, 7], [6, 8]]):
        model(batch["t"]).sum().backward()
    assert sorted(saved_rows(job, tmp_path)) == [3, 5, 6]


@pytest.mark.parametrize("module", [eg.Embedding("t", 4), eg.EmbeddingBag("t", 4)], ids=lambda m: type(m).__name__)
def test_a_module_of_no_job_says_what_to_call(module):
    with pytest.raises(
        ConfigError, match=r"'t' has no rows here: .* batches .* evaluate, .* eg.load_model\(model, path\)"
    ):
        module(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8, torch.complex64])
def test_ids_of_another_type_are_refused(dtype):
    for module in (eg.Embedding("t", 4), eg.EmbeddingBag("t", 4)):
        source(module)
        with pytest.raises(ConfigError, match=f"'t': ids of {dtype}; give int64"):
            module(torch.zeros(2, 2).to(dtype))


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2]), 3, None, "a"])
def test_ids_that_are_no_tensor_are_refused(ids):
    for module in (eg.Embedding("t", 4), eg.EmbeddingBag("t", 4)):
        source(module)
        with pytest.raises(ConfigError, match=f"'t': ids are of type {type(ids).__name__}; give a tensor"):
            module(ids)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
def test_ids_of_a_bag_in_a_wrong_shape_are_refused(shape):
    module = eg.EmbeddingBag("t", 4)
    source(module)
    with pytest.raises(ConfigError, match=r"give ids of shape .* without offsets"):
        module(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 2, 2)])
def test_offsets_with_ids_that_are_not_one_dimensional_are_refused(shape):
    module = eg.EmbeddingBag("t", 4)
    source(module)
    with pytest.raises(ConfigError, match=r"give ids of shape .* with offsets"):
        module(torch.zeros(shape, dtype=torch.int64), torch.tensor([0]))


def test_weights_per_sample_need_sums():
    module = eg.EmbeddingBag("t", 4, mode="mean")
    source(module)
    with pytest.raises(ConfigError, match="per_sample_weights need mode='sum'"):
        module(torch.zeros(1, 2, dtype=torch.int64), per_sample_weights=torch.ones(1, 2))


# -- a module like any other -------------------------------------------------------------------------------------------


def test_a_model_with_tables_can_be_printed_copied_pickled_and_has_no_weights_of_them():
    model = nn.Sequential(eg.Embedding("t", DIM), nn.Linear(DIM, 1))
    assert "Embedding('t', dim=5)" in repr(model)
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    assert copy.deepcopy(model)[0].table == pickle.loads(pickle.dumps(model))[0].table == "t"  # noqa: S301


def test_an_initializer_of_torch_is_refused():
    with pytest.raises(ConfigError, match=r"init is .*normal_.*; give one of eg.init_rows"):
        eg.Embedding("t", 4, init=nn.init.normal_)


def test_a_name_too_long_for_a_file_is_refused_before_training_and_not_after():
    eg.Embedding("x" * 200, 4)
    for name in ("x" * 201, "é" * 34):
        with pytest.raises(ConfigError, match="too long for a file name"):
            eg.Embedding(name, 4)
