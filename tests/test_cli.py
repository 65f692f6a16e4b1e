"""The `ringflash` command finds its subcommands."""

import subprocess
import sys

import pytest

from ringflash import cli


@pytest.mark.parametrize("args", ["--help", "verify --help", "demo --help"])
def test_help(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(args.split())
    assert stop.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("args", ["", "train"])
def test_an_unknown_command_is_refused(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(args.split())
    assert stop.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ringflash.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "verify" in done.stdout
