"""The data of the example: the same arrays from all three forms, and clear sentences when there are none."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def movielens():
    spec = importlib.util.spec_from_file_location("movielens_data", EXAMPLES / "movielens_data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


RATINGS = [(1, 2, 5), (2, 1, 3), (2, 4, 4), (1, 4, 1), (2, 2, 2)]
USERS = [(1, 24, "M", "writer"), (2, 60, "F", "artist")]
ITEMS = [(1, "Heat (1995)", ["Action", "Crime"]), (2, "Été (1996)", ["Drama"]), (4, "Void (1997)", [])]


def write(path, lines, encoding="utf-8"):
    path.write_text("".join(f"{line}\n" for line in lines), encoding)


def write_recbole(folder):
    folder.mkdir()
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    write(folder / "ml-100k.inter", rows + [f"{u}\t{i}\t{r}\t88" for u, i, r in RATINGS])
    rows = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    write(folder / "ml-100k.user", rows + [f"{u}\t{a}\t{g}\t{o}\t00000" for u, a, g, o in USERS])
    rows = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    rows += [f"{i}\t{title[:-7]}\t{title[-5:-1]}\t{' '.join(genres)}" for i, title, genres in ITEMS]
    write(folder / "ml-100k.item", rows)


def write_100k(folder, genre_names):
    write(folder / "u.data", [f"{u}\t{i}\t{r}\t88" for u, i, r in RATINGS])
    write(folder / "u.user", [f"{u}|{a}|{g}|{o}|00000" for u, a, g, o in USERS])
    flags = [(i, title, "|".join("01"[name in genres] for name in genre_names)) for i, title, genres in ITEMS]
    write(folder / "u.item", [f"{i}|{title}|01-Jan-1995||link|{has}" for i, title, has in flags], "latin-1")


def write_1m(folder):
    codes = {"writer": 20, "artist": 2}
    write(folder / "ratings.dat", [f"{u}::{i}::{r}::88" for u, i, r in RATINGS])
    write(folder / "users.dat", [f"{u}::{g}::{a}::{codes[o]}::00000" for u, a, g, o in USERS])
    write(
        folder / "movies.dat", [f"{i}::{title}::{'|'.join(genres) or 'None'}" for i, title, genres in ITEMS], "latin-1"
    )


def check(data):
    assert list(zip(data.user.tolist(), data.item.tolist(), data.rating.tolist(), strict=True)) == RATINGS
    assert data.age[1:].tolist() == [1, 6]
    assert data.gender[1:].tolist() == [0, 1]
    assert data.occupation[1] != data.occupation[2]
    assert data.titles == {i: title for i, title, _ in ITEMS}


def test_the_cached_files_and_a_folder_of_grouplens_are_the_same_data(movielens, tmp_path, monkeypatch):
    write_recbole(tmp_path / "ml-100k")
    write_100k(tmp_path, movielens.GENRES_100K)
    monkeypatch.setenv("EVERGRAD_CACHE", str(tmp_path))
    cached, folder = movielens.load(), movielens.load(tmp_path)
    for data in (cached, folder):
        check(data)
        assert [a.tolist() for a in data.genres] == [[0, 1, 2], [0, 0, 2, 3, 3, 3]]
    assert cached.occupation.tolist() == folder.occupation.tolist()


def test_a_folder_of_ml_1m_is_read(movielens, tmp_path):
    write_1m(tmp_path)
    data = movielens.load(tmp_path)
    check(data)
    assert data.genres[1].tolist() == [0, 0, 2, 3, 3, 4]


def test_a_split_parts_the_ratings_and_a_batch_has_their_features(movielens, tmp_path):
    write_100k(tmp_path, movielens.GENRES_100K)
    data = movielens.load(tmp_path)
    train, valid = data.split(seed=1)
    assert len(train["label"]) == 4
    parts = [zip(p["user"].tolist(), p["item"].tolist(), p["label"].tolist(), strict=True) for p in (train, valid)]
    assert sorted([*parts[0], *parts[1]]) == sorted((u, i, float(r >= 4)) for u, i, r in RATINGS)
    batch = movielens.batch_of(data.columns(np.array([1, 2, 1]), np.array([4, 1, 2])), np.array([2, 0, 1]))
    assert batch["item"].tolist() == [2, 4, 1]
    assert [t.tolist() for t in batch["genres"]] == [[2, 0, 1], [0, 1, 1]]
    sizes = [len(b["label"]) for b in movielens.batches(train, batch_size=3)]
    assert sizes == [3, 1]


def test_the_auc_of_the_plain_twin_counts_ties_half(movielens):
    assert movielens.auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])) == 0.875


def test_a_folder_without_ratings_is_refused(movielens, tmp_path):
    with pytest.raises(SystemExit, match=r"neither u\.data .* nor ratings\.dat"):
        movielens.load(tmp_path)


def test_without_a_network_one_sentence_says_what_to_do(movielens, tmp_path, monkeypatch):
    monkeypatch.setenv("EVERGRAD_CACHE", str(tmp_path / "new" / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"could not be fetched.*No matching distribution.*--data DIR"):
        movielens.load()
    assert list((tmp_path / "new" / "cache").iterdir()) == []


def test_a_wheel_with_another_hash_is_not_used(movielens, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        info = "recbole-1.2.1.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: recbole\nVersion: 1.2.1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("EVERGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match="SHA-256 differs"):
        movielens.load()
    assert list((tmp_path / "cache").iterdir()) == []
