"""Owns the checks of launch/__main__.py: output, exit status and signals on its own; running under a launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringflash.launch import __main__ as command

LAUNCH = [sys.executable, "-W", "error", "-m", "ringflash.launch"]
MPIEXEC = Path(sys.executable).with_name("mpiexec")

SHOW = """
import os, sys
print(" ".join(["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]]) + "\\n", end="")  # at once
print("to stderr", file=sys.stderr)
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(100)
"""
KILLED = """
import os, sys, time
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
time.sleep(0.4)
sys.exit("the cause")
"""
SLEEP = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(100)
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
print(f"sum={x[0].item():g}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start their own launches, so they must not look like ranks of one themselves."""
    for name in list(os.environ):
        if re.match(r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC|SLURM_STEP|PMI|MPI_LOCAL|OMPI_", name):
            monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test puts its script."""
    return tmp_path / "script.py"


def launch(
    *args: object, before: tuple[object, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    line = [*map(str, before), *LAUNCH, *map(str, args)]
    env = {**os.environ, **(env or {})}
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=50, env=env)


def alive(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# As our own launcher


def test_each_line_carries_its_rank_and_arguments_arrive(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(SHOW)
    assert command.main(["--nproc", "2", str(script), "--nproc", "9", "-m"]) == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == [f"[rank {rank}] rank {rank} of 2 --nproc 9 -m" for rank in range(2)]
    assert sorted(shown.err.splitlines()) == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_no_prefix(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(SHOW)
    assert command.main(["--nproc", "2", "--no-prefix", str(script)]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_module_and_one_rank_without_prefix(script: Path) -> None:
    script.with_name("some_module.py").write_text(SHOW)
    path = os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])
    done = launch("--nproc", 1, "-m", "some_module", "--lr", 1, env={"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 of 1 --lr 1\n", "to stderr\n")


def test_the_first_failing_rank_gives_the_status_and_ends_the_others(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(FAIL)
    begin = time.monotonic()
    assert command.main(["--nproc", "2", str(script)]) == 7
    assert capfd.readouterr().err == "ringflash.launch: rank 1 failed: exit status 7, ending the others\n"
    assert time.monotonic() - begin < 30


def test_a_rank_ended_by_a_signal_and_one_that_speaks_after_it(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(KILLED)
    assert command.main(["--nproc", "2", str(script)]) == 128 + signal.SIGKILL
    shown = capfd.readouterr().err
    assert "ringflash.launch: rank 0 failed: signal SIGKILL, ending the others" in shown
    assert "[rank 1] the cause" in shown


def test_signal_handlers_are_put_back(script: Path) -> None:
    script.write_text("")
    before = [signal.getsignal(signum) for signum in command.SIGNALS]
    assert command.main(["--nproc", "1", str(script)]) == 0
    assert [signal.getsignal(signum) for signum in command.SIGNALS] == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signals_end_every_rank(script: Path, signum: int) -> None:
    script.write_text(SLEEP)
    line = [*LAUNCH, "--nproc", "2", str(script), str(script.parent)]
    parent = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    files = [script.with_name(str(rank)) for rank in range(2)]
    end = time.monotonic() + 20
    while time.monotonic() < end and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)
    parent.send_signal(signum)
    parent.communicate(timeout=20)
    assert parent.returncode == 128 + signum
    assert not any(alive(int(file.read_text())) for file in files)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--nproc", "0", "x.py"], "nproc must be at least 1: nproc=0"),
        (["no_such_script.py"], "there is no script 'no_such_script.py'; for a module's name put -m before it"),
        ([], "the following arguments are required: SCRIPT"),
        (["--device", "tpu", "x.py"], "invalid choice: 'tpu'"),
        (["--nproc", "1000", "--device", "cuda", "x.py"], "needs one GPU per rank: nproc=1000"),
    ],
)
def test_mistakes_are_worded(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(line)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "python -m ringflash.launch --nproc 4 train.py --lr 3e-4" in shown
    assert "default: the number of visible GPUs, or 2" in shown


def test_default_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, device, expected in [(0, None, 2), (8, None, 8), (8, "cpu", 2), (1, None, 1)]:
        monkeypatch.setattr(command.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert command._default_nproc(device) == expected


# Under another launcher

SRUN_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def test_a_task_of_srun_runs_the_script_itself(script: Path) -> None:
    script.write_text(SHOW + "import helper\nsys.exit(3)")
    script.with_name("helper.py").write_text("print('helper found', __import__('os').environ['MASTER_ADDR'])")
    done = launch("--nproc", 2, script, "--x", env=SRUN_TASK)
    assert done.stdout == "rank 1 of 2 --x\nhelper found 127.0.0.1\n"
    assert done.returncode == 3


def test_a_different_nproc_under_srun_is_refused(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SRUN_TASK.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        command.main(["--nproc", "4", str(script)])
    expected = "--nproc 4 differs from what slurm started: 2 ranks, 2 on this host; leave --nproc out"
    assert expected in capsys.readouterr().err


def test_half_set_variables_are_refused(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        command.main([str(script)])
    error = capsys.readouterr().err
    assert error.startswith("python -m ringflash.launch: WORLD_SIZE is not set though RANK is: ")
    assert error.count("\n") == 1


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec next to this Python")
def test_mpiexec_without_mpi4py_is_a_sentence(script: Path) -> None:
    script.with_name("mpi4py.py").write_text("raise ImportError('none here')")
    path = os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])
    done = launch(script, before=(MPIEXEC, "-n", 1), env={"PYTHONPATH": path})
    assert done.returncode == 2
    assert done.stderr.startswith("python -m ringflash.launch: this process was started by mpiexec, and reading its rank")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec next to this Python")
def test_plain_torch_runs_unchanged_under_mpiexec(script: Path) -> None:
    script.write_text(SUM)
    done = launch(script, before=(MPIEXEC, "-n", 2))
    assert (done.returncode, done.stdout, done.stderr) == (0, "sum=2\nsum=2\n", "")


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec next to this Python")
def test_one_rank_that_exits_with_an_error_ends_the_mpiexec_job(script: Path) -> None:
    script.write_text(FAIL)
    begin = time.monotonic()
    done = launch(script, before=(MPIEXEC, "-n", 2))
    assert done.returncode == 7
    assert time.monotonic() - begin < 30
