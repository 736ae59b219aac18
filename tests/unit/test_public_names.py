"""What `import evergrad as eg` offers, and that it costs nothing before it is used."""

import inspect
import json
import subprocess
import sys

import pytest

import evergrad as eg

NAMES = (
    *("SGD", "RowWiseAdagrad", "AdamW", "FTRL", "Adagrad", "Adam", "Async", "Embedding", "EmbeddingBag", "Job", "Sync"),
    "LocalSGD",
    *("Checkpoints", "data", "errors", "hash_ids", "init", "init_rows", "load_model", "metrics"),
)


def test_the_public_names_are_these_and_no_others():
    assert sorted(eg.__all__) == sorted(NAMES)
    assert dir(eg) == sorted(NAMES)


def test_all_names_can_be_imported():
    namespace = {}
    exec("from evergrad import *", namespace)
    assert set(NAMES) <= set(namespace)
    assert all(namespace[name] is getattr(eg, name) for name in NAMES)


def test_an_unknown_name_is_an_attribute_error_as_everywhere():
    with pytest.raises(AttributeError, match="module 'evergrad' has no attribute 'Embeding'"):
        _ = eg.Embeding
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from evergrad import nothing  # noqa: F401


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_is(name):
    assert len(inspect.getdoc(getattr(eg, name))) > 20


@pytest.mark.parametrize("owner", [eg.Job, eg.Embedding, eg.EmbeddingBag, eg.SGD, eg.data.Columns])
def test_every_public_method_says_what_it_does(owner):
    own = [value for name, value in vars(owner).items() if not name.startswith("_") and callable(value)]
    assert all(inspect.getdoc(method) for method in own)


def test_importing_the_package_and_its_rules_needs_no_torch():
    code = (
        "import sys, json, evergrad as eg; eg.Sync(); eg.Adam(); eg.hash_ids(['a']); eg.init_rows.zeros(); eg.errors;"
        " eg.Checkpoints('c');"
        " print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False


def test_the_errors_are_one_tree():
    errors = [value for value in vars(eg.errors).values() if inspect.isclass(value)]
    assert all(issubclass(error, eg.errors.EvergradError) for error in errors)
    assert issubclass(eg.errors.DataError, eg.errors.ConfigError)
