"""Checkpoints as a user asks for them."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import evergrad as eg
from evergrad.errors import ConfigError
from evergrad.messages import CheckpointSpec


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        (None, None, None),
        ("1 epoch", None, None),
        ("epoch", None, None),
        (500, 500, None),
        (np.int64(7), 7, None),
        ("500 steps", 500, None),
        ("1 step", 1, None),
        ("30s", None, 30.0),
        ("30 seconds", None, 30.0),
        ("1.5 Sec", None, 1.5),
        (" 10 min ", None, 600.0),
        ("10 minutes", None, 600.0),
        ("hour", None, 3600.0),
        ("2h", None, 7200.0),
        ("0.5 hours", None, 1800.0),
        (timedelta(minutes=3), None, 180.0),
    ],
)
def test_every_is_steps_or_time(every, steps, seconds):
    assert eg.Checkpoints("/c", every=every).spec() == CheckpointSpec("/c", steps, seconds, 3)


@pytest.mark.parametrize(
    ("every", "sentence"),
    [
        (0, "every is 0; give a whole number of one or more"),
        (-5, "one or more"),
        (True, "one or more"),
        ("0 steps", "one or more"),
        (0.5, "every is 0.5, which has no unit; give a number of steps, or text as '500 steps'"),
        ("500", "every is '500'; give a number of steps, or text"),
        ("1.5 steps", "every is '1.5 steps'; give a number of steps"),
        ("10 parsecs", "give a number of steps, or text"),
        ("often", "give a number of steps, or text"),
        ("-3 min", "give a number of steps, or text"),
        ("0 s", "give a time above zero"),
        (timedelta(0), "give a time above zero"),
        ("5 epochs", "each epoch ends with a checkpoint anyway: leave it out"),
        ([10], "one or more"),
        (float("nan"), "no unit"),
    ],
)
def test_an_interval_that_is_none_says_what_one_is(every, sentence):
    with pytest.raises(ConfigError, match=f"Checkpoints: .*{sentence}"):
        eg.Checkpoints("/c", every=every).spec()


def test_the_place_is_a_folder_or_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert eg.Checkpoints(Path("c")).spec().url == f"{tmp_path}/c"
    assert eg.Checkpoints("s3://bucket/films/").spec().url == "s3://bucket/films"
    with pytest.raises(ConfigError, match="is no place for files"):
        eg.Checkpoints(7).spec()


@pytest.mark.parametrize("keep", [0, -1, None, 1.5, "3"])
def test_at_least_one_is_kept(keep):
    with pytest.raises(ConfigError, match=r"Checkpoints: keep is .*; give a whole number of one or more"):
        eg.Checkpoints("/c", keep=keep).spec()


def test_the_best_is_a_number_of_the_metrics():
    plan = eg.Checkpoints("/c", best=lambda m: -m["auc"])
    assert plan.spec().keep == 3
    assert plan.score({"auc": 0.75, "loss": 1.0}) == -0.75
    assert plan.score({"auc": float("nan")}) is None
    assert eg.Checkpoints("/c").score({"auc": 0.75}) is None


@pytest.mark.parametrize(
    ("best", "sentence"),
    [
        (lambda m: m["ndcg"], "best= fails with KeyError: 'ndcg'; the metrics reported are auc, loss"),
        (lambda m: None, "best= fails with TypeError"),
        (lambda m: "high", "best= fails with ValueError"),
        (lambda m: 1 / 0, "best= fails with ZeroDivisionError"),
    ],
)
def test_a_best_that_makes_no_number_is_told_with_the_metrics_there_are(best, sentence):
    with pytest.raises(ConfigError, match=sentence):
        eg.Checkpoints("/c", best=best).score({"loss": 1.0, "auc": 0.5})


def test_a_best_that_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="best is 'auc'; give a function"):
        eg.Checkpoints("/c", best="auc").spec()
