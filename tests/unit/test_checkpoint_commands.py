"""The commands for checkpoints, on folders that were saved before."""

import pytest
from safetensors.numpy import load_file
from saved import NEVER, group, save, schema, table, whole

from evergrad.checkpoint.catalogue import good, serials
from evergrad.checkpoint.model import Model
from evergrad.checkpoint.storage import Storage
from evergrad.cli import _main
from evergrad.messages import DataSpec, Progress
from evergrad.sizes import show_bytes

OF = schema([table("user", 4), table("item", 2)], groups=[group(head_weight=(3,))])


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = Storage("checkpoints", NEVER)
    for serial, progress in enumerate(
        [Progress(), Progress(4, 0, DataSpec(1, "", 1), is_closed=True), Progress(6, 1, DataSpec(1, "", 1))]
    ):
        save(storage, OF, whole(OF, rows=1500), serial, 2, progress=progress, metrics={0: {"auc": 0.75}})
    return storage


@pytest.fixture
def evergrad(capsys):
    """Runs a command; returns status, output and errors."""

    def run(*args):
        status = _main([*map(str, args)])
        return (status, *capsys.readouterr())

    return run


def broken(storage, serial):
    path = f"checkpoint_{serial}/{good(storage, serial).files[0].path}"
    storage.put(path, [storage.read(path)[:-1] + b"\x07"])
    return path


def test_ls_shows_what_there_is_and_what_is_wrong(storage, evergrad):
    storage.put("checkpoint_3/__model__/dense.pserver_0.group_0.elements_0-2.safetensors", [b"1"])
    storage.remove(f"checkpoint_1/{good(storage, 1).files[0].path}")
    status, out, err = evergrad("checkpoints", "ls", "checkpoints")
    assert (status, err) == (0, "")
    head, zero, one, two, three = out.splitlines()
    assert head.split() == ["serial", "made", "at", "pservers", "rows", "size"]
    assert zero.startswith("0 ")
    assert all(what in zero for what in ("before the first epoch", "3,000"))
    assert "slots_00000-04095.safetensors is missing" in one
    assert "in epoch 1, step 6" in two
    assert "the save was interrupted" in three


def test_show_tells_of_one(storage, evergrad):
    status, out, _ = evergrad("checkpoints", "show", "checkpoints/epoch_0")
    assert status == 0
    facts = ["checkpoint 1 of ", "job films", "on 2 pservers", "end of epoch 0", "epoch 0: auc 0.75"]
    for fact in [*facts, "table user: 1,500 rows of 4, adagrad", "3 numbers, adam"]:
        assert fact in out
    assert "checkpoint 2 of" in evergrad("checkpoints", "show", "checkpoints")[1]


def test_verify_reads_all_or_one_and_its_status_tells(storage, evergrad):
    status, out, _ = evergrad("checkpoints", "verify", "checkpoints")
    assert (status, out.count(": good;")) == (0, 3)
    assert "1,500 rows of user, 1,500 rows of item" in out
    path = broken(storage, 1)
    status, out, _ = evergrad("checkpoints", "verify", "checkpoints")
    assert (status, out.count(": good;")) == (1, 2)
    assert f"checkpoint 1: BAD; {storage.url}/{path} has changed since it was written" in out
    assert evergrad("checkpoints", "verify", "checkpoints/checkpoint_1")[0] == 1
    assert evergrad("checkpoints", "verify", "checkpoints/latest")[0] == 0


def test_rm_removes_one_and_says_when_other_files_stay(storage, evergrad):
    assert evergrad("checkpoints", "rm", "checkpoints/checkpoint_1")[:2] == (0, "removed checkpoint 1\n")
    storage.put("checkpoint_2/notes", [b"precious"])
    out = evergrad("checkpoints", "rm", "checkpoints/checkpoint_2")[1]
    assert out == "removed checkpoint 2; other files in its folder stay\n"
    assert list(storage.sizes("checkpoint_2")) == ["checkpoint_2/notes"]
    assert serials(storage) == [0, 2]


def test_rm_interrupted_removes_what_is_left_before_the_newest_only(storage, evergrad):
    for serial in (1, 4):
        storage.remove(f"checkpoint_{serial}/manifest.json")
        storage.put(f"checkpoint_{serial}/trainer_0/step_id", [b"1"])
    assert evergrad("checkpoints", "rm", "--interrupted", "checkpoints")[1] == "removed what was left of 1\n"
    assert serials(storage) == [0, 2, 4]
    assert evergrad("checkpoints", "rm", "--interrupted", "checkpoints")[1] == "there is nothing left\n"


@pytest.mark.parametrize(
    "args", [["checkpoints"], ["checkpoints/latest"], ["--interrupted", "checkpoints/checkpoint_1"]]
)
def test_rm_of_everything_is_refused(storage, evergrad, args):
    status, _, err = evergrad("checkpoints", "rm", *args)
    assert status == 2
    assert "rm removes one checkpoint, as URL/checkpoint_12, or what is left with --interrupted URL" in err
    assert serials(storage) == [0, 1, 2]


def test_export_writes_a_model_of_the_one_named(storage, evergrad, tmp_path):
    status, out, _ = evergrad("export", "checkpoints/checkpoint_1", "model")
    assert (status, out) == (0, "exported checkpoint 1 (end of epoch 0) to model: 3,000 rows\n")
    assert Model(tmp_path / "model").table("user")[0].size == 1500
    assert evergrad("export", "checkpoints", "plain", "--format", "torch")[0] == 0
    assert load_file("plain/model.safetensors")["user.weight"].shape == (1501, 4)


def test_reshard_writes_it_for_another_number(storage, evergrad):
    status, out, _ = evergrad("reshard", "checkpoints/latest", "other", "--pservers", "3")
    assert status == 0
    assert "wrote checkpoint 2 for 3 pservers to " in out
    assert good(Storage("other"), 2).places == 3


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (["checkpoints", "ls", "nowhere"], 2, "there are no checkpoints in "),
        (["checkpoints", "show", "nowhere"], 2, "it holds no checkpoints; give the folder of checkpoints"),
        (["checkpoints", "show", "checkpoints/checkpoint_9"], 2, "there is no checkpoint 9 in"),
        (["checkpoints", "verify", "checkpoints/epoch_7"], 2, "there is no good checkpoint of epoch 7"),
        (["checkpoints", "rm", "checkpoints/checkpoint_9"], 2, "there is no checkpoint 9 in"),
        (["checkpoints", "ls", "nonsense://x"], 2, "nonsense://x cannot be used"),
        (["checkpoints", "ls", ""], 2, "is no place for files"),
        (["checkpoints", "show", "checkpoints/checkpoint_1"], 1, "checkpoint 1 of "),
        (["export", "checkpoints", "taken"], 2, "holds no model; remove it or save to another path"),
        (["export", "checkpoints", "model", "--format", "onnx"], 2, "'onnx' is not one of"),
        (["reshard", "checkpoints", "checkpoints", "--pservers", "3"], 2, "holds a checkpoint 2 already"),
    ],
)
def test_a_mistake_is_one_sentence(storage, evergrad, tmp_path, args, status, sentence):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    storage.remove("checkpoint_1/manifest.json")
    found, _, err = evergrad(*args)
    assert (found, err.count("\n")) == (status, 1)
    assert err.startswith("evergrad: ")
    assert sentence in err


@pytest.mark.parametrize(("size", "text"), [(0, "0"), (1023, "1023"), (1024, "1.0K"), (1536 << 20, "1.5G")])
def test_sizes_are_shown_short(size, text):
    assert show_bytes(size) == text
