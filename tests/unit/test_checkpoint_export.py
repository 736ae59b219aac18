"""Models and other files out of checkpoints, with no job running."""

import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from saved import NEVER, RULES, Whole, bits, group, save, schema, table, together, whole
from torch import nn

import evergrad as eg
from evergrad import init_rows
from evergrad.checkpoint.catalogue import good, serials
from evergrad.checkpoint.export import export_model, export_torch
from evergrad.checkpoint.model import Model
from evergrad.checkpoint.pieces import DensePiece, RowsPiece
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.reshard import reshard
from evergrad.checkpoint.storage import Storage
from evergrad.errors import CheckpointError, ConfigError
from evergrad.messages import GroupKind, GroupSpec, ParameterSpec, TableSpec

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def storage(tmp_path):
    return Storage(f"memory://{tmp_path}/checkpoints", NEVER)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Net(nn.Module):
    """All types that parameters and buffers may have."""

    def __init__(self):
        super().__init__()
        self.user, self.item = eg.Embedding("user", 3), eg.EmbeddingBag("item 2", 2, feature="user")
        self.norm, self.narrow = nn.BatchNorm1d(5), nn.Linear(5, 3).to(torch.bfloat16)
        self.other, self.fixed = nn.Linear(3, 2).to(torch.float16), nn.Linear(2, 2)
        self.fixed.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.tensor([[0, 1], [2, 3]]).to(dtype))
        self.register_buffer('ünicode "name', torch.tensor(-0.0))

    def forward(self, batch):
        x = torch.cat([self.user(batch["user"]), self.item(batch["user"].unsqueeze(-1))], dim=-1)
        x = self.other(self.narrow(self.norm(x).to(torch.bfloat16)).to(torch.float16)).float()
        return self.fixed(x).square().mean() + self.nothing.sum()


def trained(job):
    torch.manual_seed(0)
    model = Net()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=0.01), sparse=eg.Adagrad())
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500, endpoint=True)
    for _ in job.epochs(1):
        for batch in job.batches({"user": keys}, 100):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    return model


def checkpoint_of(job, model, saved):
    """What a checkpoint of the job's last version holds, of the model it has saved; state is anything."""
    of, state = job._schema, model.state_dict()
    tables = []
    for number, spec in enumerate(of.tables):
        keys, values = Model(saved).table(spec.name)
        rows = np.concatenate([values, np.ones_like(values)], axis=1)
        tables.append(RowsPiece(number, range(16_384), keys, rows, None, keys[:0], np.empty((0, 2), np.int32)))
    groups = []
    for number, spec in enumerate(of.groups):
        dtype = torch.int64 if spec.kind is GroupKind.LOWEST else torch.float32
        flat = torch.cat([state[p.name].detach().reshape(-1).to(dtype) for p in spec.parameters]).numpy()
        width = spec.rule.state_width if spec.rule else 0
        updates = (1,) * len(spec.parameters)
        groups.append(DensePiece(number, range(spec.size), flat, np.ones((width, spec.size), np.float32), updates))
    return of, Whole(tables, groups)


@pytest.mark.parametrize("places", [1, 3])
def test_an_exported_model_has_the_bytes_that_the_job_saves(new_job, storage, tmp_path, places):
    job = new_job()
    model = trained(job)
    job.save_model(tmp_path / "saved")
    of, held = checkpoint_of(job, model, tmp_path / "saved")
    save(storage, of, held, places=places, files=3)
    export_model(storage, good(storage, 1), tmp_path / "exported")
    assert files(tmp_path / "exported") == files(tmp_path / "saved")
    loaded = eg.load_model(Net(), tmp_path / "exported")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_values_are_rounded_to_the_types_of_the_model_as_torch_rounds(storage, tmp_path):
    dtypes = ("float32", "float16", "bfloat16")
    of = schema([table()], [GroupSpec(GroupKind.FROZEN, None, tuple(ParameterSpec(t, (999,), t) for t in dtypes))])
    model = whole(of)
    values = (
        np.random.default_rng(0).standard_normal(2997).astype(np.float32)
        * np.float32(100) ** np.arange(-3, 3, 1 / 499.5, np.float32)[:2997]
    )
    model.groups[0] = model.groups[0]._replace(values=values)
    save(storage, of, model)
    export_model(storage, good(storage, 1), tmp_path / "model")
    found = load_file(tmp_path / "model" / "dense.safetensors")
    for number, dtype in enumerate(dtypes):
        expected = torch.from_numpy(values[999 * number : 999 * (number + 1)]).to(getattr(torch, dtype))
        assert torch.equal(found[dtype], expected)


def test_a_model_is_exported_to_a_url_and_replaces_one_that_is_there(storage, tmp_path):
    of = schema([table("user"), table("old")], [group(a=(3,))])
    save(storage, of, whole(of), serial=1)
    newer = schema([table("user"), table("new")], [group(a=(3,))])
    save(storage, newer, whole(newer, seed=1), serial=2)
    target = Storage(f"memory://{tmp_path}/model", NEVER)
    for serial, name in ((1, "old"), (2, "new")):
        export_model(storage, good(storage, serial), target.url)
        export_model(storage, good(storage, serial), tmp_path / str(serial))
        assert {path: target.read(path) for path in target.sizes()} == files(tmp_path / str(serial))
        assert f"tables/{name}.safetensors" in target.sizes()


def test_what_is_no_model_is_not_replaced_at_a_url_either(storage, tmp_path):
    of = schema()
    save(storage, of, whole(of))
    target = Storage(f"memory://{tmp_path}/model", NEVER)
    target.put("precious", [b"1"])
    with pytest.raises(ConfigError, match="is there and holds no model; remove it or save to another path"):
        export_model(storage, good(storage, 1), target.url)
    target.put("manifest.json", [b"1"])
    with pytest.raises(ConfigError, match="holds a model, and precious besides"):
        export_model(storage, good(storage, 1), target.url)
    assert sorted(target.sizes()) == ["manifest.json", "precious"]


def test_a_checkpoint_that_is_broken_leaves_no_model_and_the_old_one_stays(storage, tmp_path):
    of = schema()
    manifest = save(storage, of, whole(of))
    export_model(storage, good(storage, 1), tmp_path / "model")
    before = files(tmp_path / "model")
    path = f"checkpoint_1/{manifest.files[0].path}"
    storage.put(path, [storage.read(path)[:-1] + b"\x07"])
    for export in (export_model, export_torch):
        with pytest.raises(CheckpointError, match="has changed since it was written"):
            export(storage, good(storage, 1), tmp_path / "new")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        export_model(storage, good(storage, 1), tmp_path / "model")
    assert files(tmp_path / "model") == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_exporting_takes_memory_for_two_files_and_a_piece(storage, tmp_path):
    of = schema([table("user", 64, RULES["adam"])], groups=())
    manifest = save(storage, of, whole(of, rows=20_000, candidates=0), files=16)
    largest = max(f.bytes for f in manifest.files)
    tracemalloc.start()
    export_model(storage, manifest, tmp_path / "model")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * largest < manifest.bytes / 3


# -- for plain PyTorch -------------------------------------------------------------------------------------------------


def test_a_state_dict_and_an_index_hold_every_row_under_its_key(storage, tmp_path):
    of = schema([table("user", 3, RULES["adam"]), table("item", 2)])
    model = whole(of)
    save(storage, of, model, places=3)
    assert export_torch(storage, good(storage, 1), tmp_path / "plain") == []
    state, index = load_file(tmp_path / "plain/model.safetensors"), load_file(tmp_path / "plain/keys.safetensors")
    for piece, spec in zip(model.tables, of.tables, strict=True):
        keys, rows = index[f"{spec.name}.keys"].numpy(), index[f"{spec.name}.rows"].numpy()
        assert np.array_equal(keys, np.sort(piece.keys))
        weight = state[f"{spec.name}.weight"].numpy()
        at = dict(zip(keys.tolist(), rows.tolist(), strict=True))
        found = weight[[at[key] for key in piece.keys.tolist()]]
        assert found.tobytes() == piece.rows[:, : spec.dim].tobytes()
        assert not weight[-1].any()
    names = {p.name for g in of.groups for p in g.parameters}
    assert state.keys() == names | {"user.weight", "item.weight"}


def test_the_snippet_of_the_docs_reads_an_exported_state_dict_without_evergrad(storage, tmp_path):
    of = schema([table("user", 3), table("item", 3)], [group(head_weight=(1, 6), head_bias=(1,))])
    model = whole(of)
    for piece in model.tables:
        piece.rows[...] = np.random.default_rng(1).standard_normal(piece.rows.shape)
    model.groups[0].values[...] = 0.5
    save(storage, of, model)
    export_torch(storage, good(storage, 1), tmp_path / "plain")
    known, unknown = model.tables[0].keys[:2].tolist(), 12345
    script = run_snippet("model-format.md", "plain/model.safetensors", tmp_path, "'evergrad' not in sys.modules")
    batch = (
        f"import torch; user = torch.tensor([{known[0]}, {known[1]}, {unknown}]); item = torch.tensor([{unknown}] * 3)"
    )
    found = script(batch, "model(user, item).squeeze(-1).tolist()")
    expected = [float(model.tables[0].rows[n, :3].sum() * 0.5 + 0.5) for n in (0, 1)]
    assert found == pytest.approx([*expected, 0.5], rel=1e-5)


def test_a_key_without_a_row_reads_a_constant_where_the_table_has_one_and_else_it_is_said(storage, tmp_path):
    tables = [
        table("zero"),
        TableSpec("constant", 2, table().rule, init_rows.constant(1.5), unseen_zero=False),
        TableSpec("normal", 2, table().rule, init_rows.normal(), unseen_zero=False),
    ]
    of = schema(tables, groups=())
    save(storage, of, whole(of, rows=0))
    notes = export_torch(storage, good(storage, 1), tmp_path / "plain")
    assert notes == ["table 'normal': a key without a row reads zeros here, its first value in the job"]
    state = load_file(tmp_path / "plain/model.safetensors")
    assert state["constant.weight"].tolist() == [[1.5, 1.5]]
    assert state["normal.weight"].tolist() == [[0.0, 0.0]]


def test_a_table_called_as_a_parameters_module_is_refused(storage, tmp_path):
    of = schema([table("head")], [group(head_weight=(2,))])
    save(storage, of, whole(of))
    with pytest.raises(ConfigError, match=r"would be called as the parameter head\.weight; export without"):
        export_torch(storage, good(storage, 1), tmp_path / "plain")
    assert list(tmp_path.iterdir()) == []


def test_an_exported_state_dict_is_replaced_but_no_model_and_no_other_folder(storage, tmp_path):
    of = schema([table()], groups=())
    manifest = save(storage, of, whole(of))
    for _ in range(2):
        export_torch(storage, manifest, tmp_path / "plain")
    export_model(storage, manifest, tmp_path / "model")
    with pytest.raises(ConfigError, match="holds no model for torch"):
        export_torch(storage, manifest, tmp_path / "model")
    with pytest.raises(ConfigError, match="holds no model;"):
        export_model(storage, manifest, tmp_path / "plain")


# -- for another number of pservers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 1000])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (3, 1), (2, 5), (5, 2), (3, 3)])
def test_a_resharded_checkpoint_holds_the_same_and_its_files_match_the_places(storage, tmp_path, n, m, rows):
    of = schema()
    model = whole(of, rows=rows)
    manifest = save(storage, of, model, serial=7, places=n)
    target = Storage(f"memory://{tmp_path}/resharded", NEVER)
    made = reshard(storage, manifest, target, m)
    assert good(target, 7) == made
    assert (made.places, made.progress, made.updates) == (m, manifest.progress, manifest.updates)
    for place in range(m):
        mine = {f.path for f in made.files if f.place == place}
        held = list(pieces(target, made, place, m))
        assert {f.place for f in made.files if f.path in mine} == {place}
        assert sum(p.keys.size for p in held if isinstance(p, RowsPiece)) == sum(
            f.rows for f in made.files if f.place == place
        )
    assert bits(together(of, [p for place in range(2) for p in pieces(target, made, place, 2)])) == bits(model)


def test_a_resharding_that_fails_leaves_nothing_and_one_to_a_place_that_has_it_is_refused(storage, tmp_path):
    of = schema()
    manifest = save(storage, of, whole(of))
    with pytest.raises(ConfigError, match="holds a checkpoint 1 already; give another place"):
        reshard(storage, manifest, storage, 2)
    storage.remove(f"checkpoint_1/{manifest.files[-1].path}")
    target = Storage(tmp_path / "resharded", NEVER)
    with pytest.raises(CheckpointError, match="there is no such file"):
        reshard(storage, manifest, target, 2)
    assert serials(target) == []


# -- with safetensors alone --------------------------------------------------------------------------------------------


def run_snippet(page, marked, cwd, is_clean):
    """The page's Python block that has `marked` in it, as a function that runs it with lines before and after."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    (snippet,) = [block for block in blocks if marked in block]

    def run(before, expression):
        after = f"import json, sys\nassert {is_clean}\nprint(json.dumps({expression}))"
        code = f"{before}\n{snippet}\n{after}"
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_the_snippet_of_the_docs_reads_a_checkpoint_with_safetensors_alone(tmp_path):
    of = schema()
    model = whole(of)
    for piece in model.groups:
        piece.values[...] = np.arange(piece.values.size)
    save(Storage(tmp_path / "checkpoints", NEVER), of, model, serial=12, places=3)
    run = run_snippet("checkpoint-format.md", "manifest.json", tmp_path, "not {'evergrad', 'torch'} & set(sys.modules)")
    found = run("", "[dense['head.weight'].tolist(), [a.tolist() for a in rows['user']['keys'][:2]],"
                    " len(rows['item']['sum']), sorted(rows['user']), int(state['head.bias.step'][0])]")  # fmt: skip
    assert found[0] == np.arange(20.0).reshape(4, 5).tolist()
    assert found[1] == model.tables[0].keys[:2].tolist()
    assert found[2] == 1000
    assert {"keys", "values", "exp_avg", "exp_avg_sq", "notes", "candidates"} <= set(found[3])
    assert found[4] == 8
