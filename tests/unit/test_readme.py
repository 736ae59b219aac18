"""What the README shows is run."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_of_the_readme_trains_and_saves_a_model(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-W", "error", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert re.fullmatch(r"(epoch \d: auc \d\.\d+\n){3}", done.stdout), done.stdout
    assert (tmp_path / "model" / "manifest.json").is_file()
