"""Datasets: columns, ragged columns, torch datasets."""

import numpy as np
import pytest
import torch
from torch import nn

from evergrad.data import Bags, Columns, Dataset, Map, Ragged, as_dataset
from evergrad.errors import DataError

IDS = np.array([2, 0, 2], np.int64)


class Squares:
    """A map-style dataset without `__getitems__`."""

    def __init__(self, length=4):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if not 0 <= i < self.length:
            raise IndexError(i)
        return {"x": torch.tensor(float(i)), "y": i * i}


class Bulk(Squares):
    """The same, read in bulk."""

    def __getitems__(self, ids):
        self.asked = ids
        return [self[i] for i in ids]


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64"])
def test_a_batch_has_the_rows_asked_for_and_the_element_type_of_its_column(dtype):
    column = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    batch = Columns({"x": column}).fetch(IDS)
    assert batch["x"].dtype == torch.from_numpy(column).dtype
    assert np.array_equal(batch["x"].numpy(), column[IDS])


def test_tensors_and_lists_are_columns_too():
    weights = torch.tensor([0.5, 1.5, 2.5], requires_grad=True)
    batch = Columns({"w": weights, "n": [7, 8, 9]}).fetch(IDS)
    assert batch["w"].tolist() == [2.5, 0.5, 2.5]
    assert not batch["w"].requires_grad
    assert batch["n"].tolist() == [9, 7, 9]
    assert batch["n"].dtype == torch.int64


def test_changing_a_batch_does_not_change_the_data():
    column = np.arange(3)
    data = Columns({"x": column, "r": Ragged(column, [0, 1, 2, 3])})
    batch = data.fetch(np.arange(3))
    batch["x"].zero_()
    batch["r"].input.zero_()
    assert column.tolist() == [0, 1, 2]
    assert data.fetch(IDS)["r"].input.tolist() == [2, 0, 2]


def test_read_only_and_memory_mapped_and_big_endian_arrays_can_be_columns(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3.0))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    batch = Columns({"mapped": mapped, "big": np.arange(3, dtype=">i4")}).fetch(IDS)
    assert batch["mapped"].tolist() == [2.0, 0.0, 2.0]
    assert batch["big"].tolist() == [2, 0, 2]
    assert batch["big"].dtype == torch.int32
    del mapped


def test_no_ids_make_an_empty_batch():
    batch = Columns({"x": np.zeros((3, 2)), "r": Ragged.from_lists([[1], [], [2]])}).fetch(np.empty(0, np.int64))
    assert batch["x"].shape == (0, 2)
    assert [t.shape for t in batch["r"]] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({}, "there are no columns"),
        ({"user": [1, 2], "item": [1]}, "'user' has 2, 'item' has 1"),
        ({"user": np.empty(0)}, "'user' have no samples"),
        ({"user": 3}, "column 'user' is a single value"),
        ({"user": np.array(["a", "b"])}, r"column 'user' holds strings.*eg\.hash_ids"),
        ({"user": ["a", "b"]}, r"column 'user' holds strings.*eg\.hash_ids"),
        ({"user": np.array(["a", "b"], object)}, r"column 'user' holds strings.*eg\.hash_ids"),
        ({"user": np.array([b"a"])}, r"column 'user' holds strings.*eg\.hash_ids"),
        ({"user": np.array([None, 1])}, "column 'user' holds Python objects"),
        ({"genres": [[1, 2], [3]]}, r"column 'genres' has entries of different lengths.*Ragged\.from_lists"),
        ({"day": np.array(["2020-01-01"], "datetime64[D]")}, r"column 'day' has the element type datetime64"),
        ({"x": np.zeros(2, np.longdouble)}, "column 'x' has the element type"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, "column 'x' cannot become an array"),
        ({"x": np.ma.masked_array([1, 2], [0, 1])}, "column 'x' is a masked array"),
        ({7: np.zeros(2)}, "column name 7"),
    ],
)
def test_a_column_that_cannot_be_used_is_refused_by_name(columns, sentence):
    with pytest.raises(DataError, match=sentence):
        Columns(columns)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_the_same_columns_have_the_same_fingerprint_in_any_order_layout_and_release():
    x, r = np.arange(6, dtype=np.int32).reshape(3, 2), Ragged.from_lists([[1, 2], [], [3]])
    prints = {
        Columns({"x": x, "r": r}).fingerprint(),
        Columns({"r": Ragged(torch.tensor([1, 2, 3]), [0, 2, 2, 3]), "x": np.asfortranarray(x)}).fingerprint(),
        Columns({"x": x.astype(">i4"), "r": r}).fingerprint(),
        Columns({"x": torch.from_numpy(x), "r": r}).fingerprint(),
    }
    assert prints == {"459494bc24914b5a8a76f1fce49f6d75"}


def test_other_names_types_shapes_and_values_have_other_fingerprints():
    x = np.arange(6)
    variants = [
        {"x": x},
        {"y": x},
        {"x": x.astype(np.int32)},
        {"x": x.reshape(3, 2)},
        {"x": x.reshape(2, 3)},
        {"x": x[::-1]},
        {"x": x, "y": x},
        {"x": Ragged(x, np.arange(7))},
        {"x": Ragged(x, [0, 0, 2, 3, 4, 5, 6])},
    ]
    assert len({Columns(v).fingerprint() for v in variants}) == len(variants)


@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000), (3, 400_000)])
def test_of_a_large_column_both_ends_and_a_bounded_part_count(shape):
    x = np.zeros(shape)
    prints = {Columns({"x": x}).fingerprint()}
    for position in (0, -1):
        changed = x.copy()
        changed.flat[position] = 1
        prints.add(Columns({"x": changed}).fingerprint())
    shifted = x.copy()
    shifted[: len(x) // 2] = 1
    prints.add(Columns({"x": shifted}).fingerprint())
    assert len(prints) == 4


# -- ragged columns ----------------------------------------------------------------------------------------------------


def test_a_ragged_column_becomes_the_arguments_of_an_embedding_bag():
    lists = [[4, 1], [], [3, 3, 0], [2]]
    data = Columns({"genres": Ragged.from_lists(lists), "label": np.zeros(4)})
    bags = data.fetch(np.array([2, 1, 0, 1]))["genres"]
    assert isinstance(bags, Bags)
    assert bags.input.tolist() == [3, 3, 0, 4, 1]
    assert bags.offsets.tolist() == [0, 3, 3, 5]
    assert bags.input.dtype == bags.offsets.dtype == torch.int64
    module = nn.EmbeddingBag(5, 3, mode="sum")
    rows = module.weight
    expected = torch.stack([rows[3] + rows[3] + rows[0], torch.zeros(3), rows[4] + rows[1], torch.zeros(3)])
    assert torch.allclose(module(*bags), expected)


def test_a_ragged_column_may_be_empty_bags_only():
    column = Ragged.from_lists([[], [], []])
    assert len(column) == 3
    bags = Columns({"g": column}).fetch(IDS)["g"]
    assert bags.input.shape == (0,)
    assert bags.offsets.tolist() == [0, 0, 0]


def test_ragged_lists_may_be_tuples_arrays_and_tensors_of_the_whole_int64_range():
    column = Ragged.from_lists([(-(2**63),), np.array([1, 2]), torch.tensor([2**63 - 1]), np.empty(0)])
    assert column.values.tolist() == [-(2**63), 1, 2, 2**63 - 1]
    assert column.offsets.tolist() == [0, 1, 3, 4, 4]
    assert column.values.dtype == np.int64


def test_random_ragged_columns_yield_their_lists(seed):
    rng = np.random.default_rng(seed)
    lists = [rng.integers(-9, 9, rng.integers(0, 6)).tolist() for _ in range(200)]
    column = Ragged.from_lists(lists)
    ids = rng.integers(0, 200, 300)
    values, begins = column.take(ids)
    ends = [*begins[1:], len(values)]
    assert [values[a:b].tolist() for a, b in zip(begins, ends, strict=True)] == [lists[i] for i in ids]


@pytest.mark.parametrize(
    ("values", "offsets", "sentence"),
    [
        ([1, 2, 3], [0, 1, 2], "from 0 to 2; they must go from 0 to the number of values, 3"),
        ([1, 2, 3], [1, 3], "from 1 to 3"),
        ([1, 2, 3], [0, 2, 1, 3], "fall after position 1"),
        ([1, 2, 3], [], "offsets is empty"),
        ([1.5], [0, 1], "values has the element type float64"),
        (["a"], [0, 1], r"values holds strings.*eg\.hash_ids"),
        (np.array([1], np.uint64), [0, 1], "values has the element type uint64"),
        ([[1]], [0, 1], "values has shape"),
        ([1], [0.0, 1.0], "offsets has the element type float64"),
    ],
)
def test_a_wrong_ragged_column_is_refused(values, offsets, sentence):
    with pytest.raises(DataError, match=sentence):
        Ragged(values, offsets)


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        ([1, 2], "one list of integers a sample"),
        ([[1], None], "one list of integers a sample"),
        ([["a", "b"]], r"holds strings.*eg\.hash_ids"),
        (["ab"], r"holds strings.*eg\.hash_ids"),
        ([[0.5]], "float64"),
        ([[2**63]], "uint64"),
    ],
)
def test_lists_that_are_not_of_integers_are_refused(lists, sentence):
    with pytest.raises(DataError, match=sentence):
        Ragged.from_lists(lists)


# -- torch datasets ----------------------------------------------------------------------------------------------------


def test_a_torch_dataset_is_read_by_number_and_collated_as_torch_does():
    batch = Map(Squares()).fetch(IDS)
    assert batch["x"].tolist() == [2.0, 0.0, 2.0]
    assert batch["y"].tolist() == [4, 0, 4]


def test_getitems_is_used_where_present_with_plain_integers():
    dataset = Bulk()
    assert Map(dataset).fetch(IDS)["y"].tolist() == [4, 0, 4]
    assert dataset.asked == [2, 0, 2]
    assert {type(i) for i in dataset.asked} == {int}


def test_a_collate_function_makes_the_batch():
    assert Map(Bulk(), collate_fn=len).fetch(IDS) == 3


def test_datasets_of_torch_itself_work():
    from torch.utils.data import Subset, TensorDataset

    dataset = Subset(TensorDataset(torch.arange(10), torch.arange(10) * 2), [5, 6, 7])
    first, second = Map(dataset).fetch(IDS)
    assert first.tolist() == [7, 5, 7]
    assert second.tolist() == [14, 10, 14]


def test_the_fingerprint_of_a_torch_dataset_knows_its_length_type_and_form_and_no_random_values():
    class Noisy(Squares):
        def __getitem__(self, i):
            return torch.rand(2), [1] * int(torch.randint(1, 5, ()))

    class Double(Squares):
        def __getitem__(self, i):
            return torch.rand(2).double(), i

    assert Map(Noisy()).fingerprint() == Map(Noisy()).fingerprint()
    prints = {Map(d).fingerprint() for d in (Squares(), Squares(5), Bulk(), Noisy(), Double())}
    assert len(prints) == 5


def test_what_a_torch_dataset_raises_reaches_the_script():
    with pytest.raises(IndexError):
        Map(Squares()).fetch(np.array([9]))


def test_an_iterable_or_empty_torch_dataset_is_refused():
    with pytest.raises(DataError, match="cannot be read by sample number"):
        Map(iter([1]))
    with pytest.raises(DataError, match="Squares has no samples"):
        Map(Squares(0))


# -- what may be given for a dataset -----------------------------------------------------------------------------------


def test_what_may_be_given_for_a_dataset():
    class Frame:
        """Like a DataFrame: columns by name, and a number of rows."""

        def keys(self):
            return ["x"]

        def __getitem__(self, name):
            return {"x": np.arange(5)}[name]

        def __len__(self):
            return 5

    columns = Columns({"x": [1, 2]})
    assert as_dataset(columns) is columns
    assert isinstance(as_dataset({"x": [1, 2]}), Columns)
    assert isinstance(as_dataset(Squares()), Map)
    assert isinstance(as_dataset([(1, 2), (3, 4)]), Map)
    frame = as_dataset(Frame())
    assert isinstance(frame, Columns)
    assert len(frame) == 5
    assert all(isinstance(d, Dataset) for d in (columns, Map(Squares())))


def test_what_cannot_be_a_dataset_is_refused_with_one_sentence():
    from torch.utils.data import DataLoader

    for data in (3, None, "abc", iter([1]), DataLoader(Squares())):
        with pytest.raises(DataError, match=f"{type(data).__name__} cannot be read by sample number"):
            as_dataset(data)
