"""What a saved model looks like, and that it is there as a whole or not at all."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import evergrad as eg
from evergrad.checkpoint.model import DenseTensor, Model, new_model
from evergrad.errors import CheckpointError, ConfigError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import TableSpec
from evergrad.optim import SGD

SPEC = TableSpec("user", 2, SGD().spec(), eg.init_rows.zeros(), True)
KEYS, VALUES = np.array([5, -1, 7]), np.arange(6, dtype=np.float32).reshape(3, 2)


PIECES = [KEYS[:2], KEYS[2:]], [VALUES[:1], VALUES[1:]]


def write(path, spec=SPEC, pieces=PIECES, dense=b"dense"):
    with new_model(path, seed=3) as writer:
        writer.dense([DenseTensor("bias", "uint8", (len(dense),), dense)])
        writer.table(spec, len(KEYS), *pieces)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_a_folder_of_a_manifest_and_files_that_safetensors_reads(model):
    assert sorted(files(model)) == ["dense.safetensors", "manifest.json", "tables/user.safetensors"]
    arrays = load_file(model / "tables/user.safetensors")
    assert (arrays["keys"].dtype, arrays["values"].dtype) == (np.int64, np.float32)
    assert np.array_equal(arrays["keys"], KEYS)
    assert np.array_equal(arrays["values"], VALUES)


def test_the_manifest_names_every_file_with_its_size_and_checksum(model):
    manifest = json.loads((model / "manifest.json").read_bytes())
    assert manifest["format"] == "evergrad-model-1"
    assert manifest["tables"]["user"] == {
        "file": "tables/user.safetensors",
        "dim": 2,
        "rows": 3,
        "seed": 3,
        "initializer": {"name": "zeros", "a": 0.0, "b": 0.0},
        "unseen_zero": True,
    }
    for name, saved in manifest["files"].items():
        content = (model / name).read_bytes()
        assert saved == {"bytes": len(content), "blake2b": hashlib.blake2b(content, digest_size=16).hexdigest()}


def test_what_was_written_is_read(model):
    keys, values = Model(model).table("user")
    assert np.array_equal(keys, KEYS)
    assert np.array_equal(values, VALUES)


def test_the_bytes_do_not_depend_on_pieces_or_time(model, tmp_path):
    write(tmp_path / "other", pieces=(iter([KEYS[:0], KEYS]), iter([VALUES, VALUES[:0]])))
    assert files(tmp_path / "other") == files(model)


@pytest.mark.parametrize("keys", [KEYS[:2], np.append(KEYS, 1)])
def test_more_or_fewer_rows_than_said_are_refused_and_leave_nothing(tmp_path, keys):
    with pytest.raises(CheckpointError, match=r"table 'user': \d+ bytes of keys for 3 rows; save again"):
        write(tmp_path / "model", pieces=([keys], [VALUES]))
    assert list(tmp_path.iterdir()) == []


# -- as a whole or not at all ------------------------------------------------------------------------------------------


def test_a_model_appears_only_when_it_is_complete(tmp_path):
    with new_model(tmp_path / "model", seed=0) as writer:
        writer.dense([])
        writer.table(SPEC, 3, [KEYS], [VALUES])
        assert not (tmp_path / "model").exists()
        (half,) = tmp_path.iterdir()
        with pytest.raises(CheckpointError, match=r"holds no model: there is no manifest.json"):
            Model(half)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, OSError])
def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(model, error):
    before = files(model)

    def keys():
        yield KEYS
        raise error

    with pytest.raises((error, ConfigError)):
        write(model, pieces=(keys(), [VALUES]), dense=b"new")
    assert files(model) == before
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_model_is_replaced_by_a_new_one_whole(model):
    other = TableSpec("item", 2, SGD().spec(), eg.init_rows.zeros(), False)
    write(model, other, dense=b"new")
    assert sorted(files(model)) == ["dense.safetensors", "manifest.json", "tables/item.safetensors"]
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_model_goes_into_an_empty_folder_and_into_folders_that_are_not_there_yet(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        write(path)
        assert Model(path).table("user")[0].size == 3


def test_a_model_can_be_saved_to_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(Path("sub/../model"))
    assert Model(tmp_path / "here" / "model").table("user")[0].size == 3


def test_a_link_to_a_model_stays_a_link_and_the_model_behind_it_is_replaced(model):
    link = model.parent / "latest"
    link.symlink_to("model")
    write(link, dense=b"new")
    assert link.is_symlink()
    assert (model / "dense.safetensors").read_bytes().endswith(b"new")
    assert sorted(path.name for path in model.parent.iterdir()) == ["latest", "model"]


def make_file(path):
    path.write_text("precious")


def make_folder(path):
    path.mkdir()
    (path / "precious").write_text("precious")


def make_link_to_a_file(path):
    path.with_name("to a file").write_text("precious")
    path.symlink_to("to a file")


@pytest.mark.parametrize("make", [make_file, make_folder, make_link_to_a_file])
def test_what_is_no_model_is_never_replaced(tmp_path, make):
    make(tmp_path / "model")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="is there and holds no model; remove it or save to another path"):
        write(tmp_path / "model")
    assert files(tmp_path) == before


def test_a_link_that_leads_nowhere_or_in_a_circle(tmp_path):
    (tmp_path / "link").symlink_to("model")
    write(tmp_path / "link")
    assert Model(tmp_path / "model").table("user")[0].size == 3
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match="circle"):
        write(tmp_path / "circle")


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot save a model to .*file/model: .*; give another path"):
        write(tmp_path / "file" / "model")
    with pytest.raises(ConfigError, match="cannot save a model to"):
        write(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    "name", ["a b", "ä", "..", ".", "a%2Fb", "C:\\x", "*?", "'\"", "user.safetensors", "日本", "~"]
)
def test_a_table_may_have_any_printable_name(tmp_path, name):
    write(tmp_path / "model", TableSpec(name, 2, SGD().spec(), eg.init_rows.zeros(), True))
    assert np.array_equal(Model(tmp_path / "model").table(name)[0], KEYS)
    assert len(list((tmp_path / "model" / "tables").iterdir())) == 1


# -- what cannot be read -----------------------------------------------------------------------------------------------


def test_a_path_without_a_model_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"holds no model: there is no manifest.json in it"):
            Model(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Model(tmp_path / "file")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 1}', b'{"format": "evergrad-model-1", "tables": {"a": 1}}'],
)
def test_a_manifest_that_is_none_is_refused(model, text):
    (model / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        Model(model)


def test_a_model_of_another_format_says_which(model):
    manifest = (model / "manifest.json").read_text()
    (model / "manifest.json").write_text(manifest.replace("evergrad-model-1", "evergrad-model-2"))
    with pytest.raises(CheckpointError, match="is of format 'evergrad-model-2'; this version reads 'evergrad-model-1'"):
        Model(model)


@pytest.mark.parametrize("name", ["dense.safetensors", "tables/user.safetensors"])
@pytest.mark.parametrize("cut", [0, 1, -1])
def test_a_file_that_is_cut_short_is_named_with_its_sizes(model, name, cut):
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match=rf"{name} has \d+ bytes and should have {len(content)}; copy the model"):
        Model(model)


def test_a_file_that_is_missing_is_named(model):
    shutil.rmtree(model / "tables")
    with pytest.raises(CheckpointError, match=r"user.safetensors has 0 bytes and should have"):
        Model(model)


@pytest.mark.parametrize("position", [0, 3, 20, -1, -30])
def test_one_byte_that_changed_is_found(model, position):
    path = model / "tables/user.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"user.safetensors has changed since it was written; copy the model again"
    ):
        Model(model).table("user")


def test_a_table_that_does_not_fit_the_manifest_is_refused(model):
    manifest = json.loads((model / "manifest.json").read_bytes())
    manifest["tables"]["user"]["dim"] = 3
    (model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="do not fit"):
        Model(model).table("user")


def test_a_manifest_that_points_elsewhere_is_refused(model):
    manifest = json.loads((model / "manifest.json").read_bytes())
    shutil.copy(model / "tables/user.safetensors", model.parent / "elsewhere.safetensors")
    manifest["tables"]["user"]["file"] = "../elsewhere.safetensors"
    (model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        Model(model).table("user")


# -- saved by a job ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = eg.Embedding("a", 3), eg.EmbeddingBag("b", 2, feature="a")
        self.unused = eg.Embedding("c", 4)
        self.norm, self.narrow = nn.BatchNorm1d(5), nn.Linear(5, 2).to(torch.bfloat16)

    def forward(self, batch):
        x = torch.cat([self.a(batch["a"]), self.b(batch["a"].unsqueeze(-1))], dim=-1)
        return self.narrow(self.norm(x).to(torch.bfloat16)).float().square().mean()


def trained(job, rows=3000):
    torch.manual_seed(0)
    model = Net()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=0.01), sparse={"a": eg.Adagrad(), "*": eg.Adam()})
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows, endpoint=True)
    for _ in job.epochs(1):
        for batch in job.batches({"a": keys}, 500):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    return model, keys


def test_the_saved_bytes_are_the_same_for_any_number_of_pservers(new_job, pservers, tmp_path):
    for number in (1, pservers):
        job = new_job(number, eg.Sync(2))
        trained(job)
        job.save_model(tmp_path / str(number))
    assert files(tmp_path / "1") == files(tmp_path / str(pservers))


def test_tables_are_sorted_by_slot_and_key_and_hold_every_key_once(new_job, pservers, tmp_path):
    job = new_job(pservers)
    _, trained_on = trained(job)
    job.save_model(tmp_path / "model")
    keys, _ = Model(tmp_path / "model").table("a")
    assert np.array_equal(np.lexsort((keys, slots_of(keys))), np.arange(keys.size))
    assert np.array_equal(np.sort(keys), np.unique(trained_on))


def test_dense_values_keep_their_names_and_types(new_job, tmp_path):
    job = new_job()
    model, _ = trained(job)
    job.save_model(tmp_path / "model")
    from safetensors.torch import load_file as load_torch

    saved = load_torch(tmp_path / "model" / "dense.safetensors")
    assert {name: value.dtype for name, value in saved.items()} == {
        name: value.dtype for name, value in model.state_dict().items()
    }
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_a_table_without_rows_is_saved_empty(new_job, pservers, tmp_path):
    job = new_job(pservers)
    trained(job, 10)
    job.save_model(tmp_path / "model")
    keys, values = Model(tmp_path / "model").table("c")
    assert (keys.shape, values.shape) == ((0,), (0, 4))


def test_a_model_saved_before_training_is_the_initial_one(new_job, pservers, tmp_path):
    job = new_job(pservers)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job.optimizer(model, dense=eg.SGD(), sparse=eg.SGD())
    job.save_model(tmp_path / "model")
    assert Model(tmp_path / "model").table("a")[0].size == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_table_larger_than_a_piece_is_saved_in_pieces_with_the_same_bytes(new_job, pservers, tmp_path, monkeypatch):
    job = new_job(pservers)
    trained(job)
    job.save_model(tmp_path / "whole")
    monkeypatch.setattr("evergrad.trainer.trainer.EXPORT_BYTES", 100)
    job.save_model(tmp_path / "pieces")
    assert files(tmp_path / "whole") == files(tmp_path / "pieces")


def test_a_model_can_be_saved_in_every_epoch_to_one_path(new_job, tmp_path):
    job = new_job()
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(model, dense=eg.SGD())
    seen = set()
    for _ in job.epochs(3):
        for batch in job.batches({"x": torch.ones(4, 1)}, 4):
            optimizer.zero_grad()
            model(batch["x"]).sum().backward()
            optimizer.step()
        job.save_model(tmp_path / "model")
        seen.add((tmp_path / "model" / "dense.safetensors").read_bytes())
    assert len(seen) == 3


def test_a_save_that_cannot_be_done_says_why_and_the_job_goes_on(new_job, tmp_path):
    job = new_job()
    trained(job, 10)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"save_model: .* is there and holds no model"):
        job.save_model(tmp_path / "taken")
    job.save_model(str(tmp_path / "model") + "/")
    assert Model(tmp_path / "model").table("a")[0].size == 10


def test_what_a_killed_saving_left_behind_goes_with_the_next_one(tmp_path):
    gone, living = tmp_path / ".model.999999999.0123abcd", tmp_path / f".model.{os.getpid()}.0123abcd"
    others = [tmp_path / ".model.999999999.0123abcd.txt", tmp_path / ".model2.999999999.0123abcd"]
    for folder in (gone, living, *others):
        folder.mkdir()
    with new_model(tmp_path / "model", 0) as writer:
        writer.dense([])
    assert not gone.exists()
    assert all(folder.exists() for folder in (living, *others))


def test_an_old_model_set_aside_by_a_killed_saving_is_kept_while_there_is_no_other(tmp_path):
    aside = tmp_path / ".model.999999999.0123abcd.old"
    aside.mkdir()
    with new_model(tmp_path / "model", 0) as writer:
        assert aside.exists()
        writer.dense([])
    with new_model(tmp_path / "model", 0) as writer:
        writer.dense([])
    assert not aside.exists()


def test_a_model_beside_which_somebody_keeps_other_files_is_not_replaced(tmp_path):
    for name in ("model", "kept"):
        with new_model(tmp_path / name, 0) as writer:
            writer.dense([])
    (tmp_path / "kept" / "NOTES.md").write_text("mine")
    with (
        pytest.raises(ConfigError, match=r"holds a model, and NOTES\.md besides"),
        new_model(tmp_path / "kept", 0),
    ):
        pass
    assert (tmp_path / "kept" / "NOTES.md").read_text() == "mine"
