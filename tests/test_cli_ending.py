"""How commands end where a person has to act: Ctrl-C and launcher problems, one line and an exit status each."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ringflash.cli import ending
from ringflash.launch import mpi

ROOT = Path(__file__).parents[1]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
LAUNCH = r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC|SLURM_STEP|PMI|MPI_LOCAL|OMPI_"
COMMANDS = {
    "ringflash demo": ("ringflash.demo", "--device", "cpu", "--part", "copy", "--cut"),
    "ringflash verify": ("ringflash.cli", "verify", "--device", "cpu", "--seqlen", "30000"),
}


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of a launcher that runs these tests."""
    return {name: value for name, value in os.environ.items() if not re.match(LAUNCH, name)} | {"PYTHONPATH": str(ROOT)} | more


def in_group(group: int) -> list[int]:
    """The processes of a group, but not its leader."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, pgid, stat in rows if int(pgid) == group != int(pid) and not stat.startswith("Z")]


@pytest.mark.parametrize("seconds", [0.0, 6.0], ids=["while the ranks start", "while they work"])
@pytest.mark.parametrize("prog", COMMANDS)
def test_ctrl_c_is_one_line_and_leaves_nobody(prog: str, seconds: float) -> None:
    """The signal goes to the whole group, as a terminal sends it; the ranks are the group's other members."""
    line = [sys.executable, "-m", *COMMANDS[prog]]
    parent = subprocess.Popen(
        line, env=environment(), start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 30
    while len(in_group(parent.pid)) < 3 and time.monotonic() < end:  # two ranks, and Python's helper for spawning
        time.sleep(0.05)
    time.sleep(seconds)
    os.killpg(parent.pid, signal.SIGINT)
    _, error = parent.communicate(timeout=30)
    assert (parent.returncode, error) == (130, f"{prog}: interrupted\n")
    while in_group(parent.pid) and time.monotonic() < end + 30:
        time.sleep(0.05)
    assert not in_group(parent.pid)


@pytest.mark.parametrize("prog", COMMANDS)
def test_contradictory_variables_are_a_sentence(prog: str) -> None:
    line = [sys.executable, "-m", *COMMANDS[prog]]
    done = subprocess.run(line, env=environment(RANK="5", WORLD_SIZE="2"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{prog}: RANK must lie between 0 and WORLD_SIZE - 1: RANK=5, WORLD_SIZE=2; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec next to this Python")
@pytest.mark.parametrize("prog", COMMANDS)
def test_mpiexec_without_mpi4py_is_a_sentence(prog: str, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('none here')")
    variables = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    line = [str(MPIEXEC), "-n", "1", sys.executable, "-m", *COMMANDS[prog]]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{prog}: this process was started by mpiexec, and reading its rank needs mpi4py")
    assert done.stderr.count("\n") == 1


def test_only_what_bootstrap_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the body, and ranks that did not find each other, keep their traceback."""
    for name in [name for name in os.environ if re.match(LAUNCH, name)]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"^body$"), ending.launched("cpu"):
        raise ValueError("body")
    with pytest.raises(ending.Refused, match="device must be"), ending.launched("meta"):
        pass

    def lost(**_options: object) -> None:
        raise dist.DistNetworkError("nobody there")

    monkeypatch.setattr(ending, "bootstrap", lost)
    with pytest.raises(dist.DistNetworkError), ending.launched("cpu"):
        pass


def test_a_refusal_ends_the_mpiexec_job_it_is_part_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(mpi, "end_job", ended.append)

    def refuse() -> int:
        raise ending.Refused("there is no such GPU")

    assert ending.ending("prog", refuse) == 2
    assert capsys.readouterr().err == "prog: there is no such GPU\n"
    assert ending.ending("prog", lambda: 1) == 1
    assert ended == [2]
