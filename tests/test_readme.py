"""The README's example runs as it stands, and its commands are those that CI runs."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ten_lines_run_on_two_ranks(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "ten_lines.py").write_text(example)
    command = [sys.executable, "-m", "ringflash.launch", "--nproc", "2", "--device", "cpu", str(tmp_path / "ten_lines.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == [
        "rank 0 of 2: 501 tokens from position 0",
        "rank 1 of 2: 500 tokens from position 250",
    ]


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    names = re.findall(r"^( *)(\S+\.py|\S+/)", tree, re.MULTILINE)
    assert names
    for indent, name in names:
        assert (ROOT / ("ringflash" if indent else "") / name).exists(), name
