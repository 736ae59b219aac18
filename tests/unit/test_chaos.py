"""What `make chaos` calls a broken promise."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from chaos import KINDS, RULES, Outcome, grid, other_bits, wrong_with
from safetensors.numpy import save_file
from traces import miscounted

SAMPLES, EPOCHS, BATCH = 8, 2, 2
MOST = 1000
SYNC = RULES[0]


def felt(**missing: int) -> Outcome:
    counts = Counter(dict.fromkeys(KINDS, 3) | missing)
    return Outcome(1, 60, counts.copy(), counts)


def test_a_run_in_which_every_kind_of_fault_was_felt_and_nothing_broke_is_good() -> None:
    assert wrong_with({rule: felt() for rule in RULES}, MOST) == []


def test_a_broken_promise_is_told_with_its_rule() -> None:
    outcome = felt()
    outcome.broken.append("round 3: not same bits: dense.safetensors")
    assert wrong_with({SYNC: outcome}, MOST) == ["sync: round 3: not same bits: dense.safetensors"]


def test_a_kind_of_fault_that_was_never_felt_makes_a_run_that_shows_nothing() -> None:
    assert wrong_with({SYNC: felt(freeze=0)}, MOST) == ["sync: none of these was felt: freeze"]


def test_a_rule_that_was_to_be_hurt_often_and_was_not_shows_nothing() -> None:
    films = next(rule for rule in RULES if rule.least == 50)
    outcome = felt()
    outcome.strikes = 49
    assert wrong_with({films: outcome}, MOST) == ["films: hurt only 49 times in 1 jobs, not 50 times"]
    assert wrong_with({films: outcome}, 49) == []


def test_the_table_has_a_column_for_each_rule_and_a_row_for_each_kind() -> None:
    table = grid({rule: felt() for rule in RULES})
    assert len(table.columns) == 1 + len(RULES)
    assert table.row_count >= len(KINDS)


@pytest.mark.parametrize("change", ["value", "missing", "more"])
def test_one_file_that_differs_is_named(tmp_path: Path, change: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for model in (one, other):
        model.mkdir()
        (model / "same").write_bytes(b"same")
        (model / "file").write_bytes(b"value")
    assert other_bits(SYNC, one, other) == ""
    match change:
        case "value":
            (one / "file").write_bytes(b"other")
        case "missing":
            (one / "file").unlink()
        case _:
            (other / "file").rename(other / "elsewhere")
    assert "file" in other_bits(SYNC, one, other).split(", ")


def saved(folder: Path, times: np.ndarray, keys: np.ndarray, updates: int) -> Path:
    """A model of `count.py` in which samples were applied so often, in batches of two."""
    (folder / "tables").mkdir(parents=True)
    values = -times.astype(np.float32)
    save_file({"keys": keys, "values": values}, folder / "tables" / "trace.safetensors")
    save_file({"applied": np.full(3, -updates, np.float32)}, folder / "dense.safetensors")
    return folder


def test_samples_applied_once_an_epoch_are_right(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", np.ones((SAMPLES, EPOCHS)), np.arange(SAMPLES), 8)
    assert miscounted(model, "async", SAMPLES, EPOCHS, BATCH) == ""


def test_a_sample_applied_twice_or_never_is_named(tmp_path: Path) -> None:
    times = np.ones((SAMPLES - 1, EPOCHS))
    times[3, 1] = 2
    model = saved(tmp_path / "model", times, np.arange(SAMPLES - 1), 9)
    said = miscounted(model, "async", SAMPLES, EPOCHS, BATCH)
    assert "samples without a row: [7]" in said
    assert "how often samples were applied, by epoch: {3: [1.0, 2.0]}" in said
    assert "updates of dense parameters, not 8: [9.0, 9.0, 9.0]" in said
