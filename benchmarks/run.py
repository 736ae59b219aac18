"""What Evergrad costs beside plain PyTorch, memory and bare sockets: `make bench`.

Prints one table and writes the same as JSON beside it. Every line is a ratio of two things measured in the same run, in
turns, or a count; `docs/performance.md` explains each. `--quick` takes a minute and says little.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import auc
import checkpoints
import click
import cut
import recovery
import remote
import rules
import saving
import tables
import torch
import trouble
from rich.console import Console
from rich.table import Table as Grid

from evergrad.kernels.warm import warm
from evergrad.version import VERSION

RESULTS = Path(__file__).parent / "results"

Figures = Iterator[Mapping[str, object]]

SECTIONS: dict[str, Callable[[bool], Figures]] = {
    "tables": lambda quick: tables.tables(*((200_000, 500_000) if quick else ())),
    "rules": lambda quick: iter(rules.measure(*((100_000, 10_000) if quick else ()))),
    "remote": remote.figures,
    "click": click.figures,
    "trouble": trouble.figures,
    "checkpoints": checkpoints.figures,
    "cut": cut.figures,
    "saving": saving.figures,
    "recovery": recovery.figures,
    "auc": auc.figures,
}


def main() -> int:
    """Measure everything, show it and write it down."""
    parser = argparse.ArgumentParser(description="Measure Evergrad against plain PyTorch, memory and bare sockets.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--json", type=Path, default=RESULTS / "latest.json", help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    warm()
    console = Console(width=130)
    found: list[dict[str, object]] = []
    for section in [options.only] if options.only else SECTIONS:
        for figure in SECTIONS[section](options.quick):
            found.append({"section": section, **figure})
            console.print(f"{figure['name']}: {_shown(figure)}", markup=False, highlight=False)
    console.print(_grid(found))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"version": VERSION, "torch": torch.__version__, "machine": platform.machine(), "quick": options.quick}
    options.json.write_text(json.dumps({**about, "figures": found}, indent=2) + "\n")
    return 0


def _grid(figures: list[dict[str, object]]) -> Grid:
    grid = Grid("figure", "value", "target", "met")
    for figure in figures:
        met = {True: "yes", False: "NO", None: ""}[figure["met"]]  # type: ignore[index]
        grid.add_row(str(figure["name"]), _shown(figure), str(figure["target"]), met)
    return grid


def _shown(figure: Mapping[str, object]) -> str:
    return f"{figure['value']:.2f} {figure['unit']}"


if __name__ == "__main__":
    sys.exit(main())
