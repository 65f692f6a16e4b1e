"""The `ringflash` command finds its subcommands."""

import importlib.metadata
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


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for found, words in (("1.2.3", "1.2.3"), (importlib.metadata.PackageNotFoundError("ringflash"), "unknown (not installed)")):

        def version(_name: str, found: object = found) -> str:
            if isinstance(found, Exception):
                raise found
            return str(found)

        monkeypatch.setattr(cli.importlib.metadata, "version", version)
        with pytest.raises(SystemExit) as stop:
            cli.main(["--version"])
        assert stop.value.code == 0
        assert capsys.readouterr().out == f"ringflash {words}\n"


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ringflash.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "verify" in done.stdout
