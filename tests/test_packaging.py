"""Wheel, sdist, editable install and uninstalled use all give the same importable package."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("ringflash", "kernels", "launch", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
CODE = """
import importlib.util, ringflash, ringflash.cli, ringflash.demo, ringflash.kernels.reference, ringflash.launch.world
found = [importlib.util.find_spec(name) for name in ("kernels", "launch")]
print(ringflash.__file__, *("absent" if spec is None else spec.origin or "namespace" for spec in found), sep="|")
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    found = subprocess.run([str(x) for x in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def built(source: Path) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    return source / "dist"


def python_files(source: Path) -> set[str]:
    """Every module of the package, those behind the symlinks too."""
    found = {
        *source.glob("ringflash/**/*.py"),
        *source.glob("ringflash/kernels/**/*.py"),
        *source.glob("ringflash/launch/**/*.py"),
    }
    return {p.relative_to(source).as_posix() for p in found}


def test_the_wheel_holds_every_module_as_a_real_file(built: Path, source: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        held = {name for name in wheel.namelist() if name.endswith(".py")}
        assert held == python_files(source)
        for name in ("kernels/reference.py", "launch/world.py"):
            assert wheel.read(f"ringflash/{name}") == (source / name).read_bytes()


def test_the_sdist_holds_every_module(built: Path, source: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        held = {name.partition("/")[2]: sdist.extractfile(name) for name in sdist.getnames() if name.endswith(".py")}
        for name in python_files(source):
            file = held[name]
            assert file is not None
            assert file.read() == (source / name).read_bytes()


def fresh_python(folder: Path) -> Path:
    """The Python of a new environment that finds this one's packages, but first its own."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "parent.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return folder / "bin" / "python"


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable"])
def installed(
    request: pytest.FixtureRequest, built: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """How ringflash was installed, and the Python of the environment that holds it."""
    folder = tmp_path_factory.mktemp(request.param)
    python = fresh_python(folder / "venv")
    what = {"wheel": [*built.glob("*.whl")], "sdist": [*built.glob("*.tar.gz")], "editable": ["-e", source]}[request.param]
    run(*PIP, "--python", python, "install", "--no-index", "--no-deps", "--no-build-isolation", *what, cwd=folder)
    return request.param, python


def test_installed(installed: tuple[str, Path], source: Path, tmp_path: Path) -> None:
    kind, python = installed
    file, *others = run(python, "-c", CODE, cwd=tmp_path).strip().split("|")
    assert Path(file).is_relative_to(source if kind == "editable" else python.parent.parent)
    # An editable install puts the tree itself on sys.path: folders without __init__.py, which any real package precedes.
    assert others == (["namespace"] if kind == "editable" else ["absent"]) * 2
    assert "usage" in run(python.parent / "ringflash", "--help", cwd=tmp_path)
    assert run(python.parent / "ringflash", "--version", cwd=tmp_path).split() == ["ringflash", "0.1.0"]


def test_a_folder_called_ringflash_does_not_hide_it(installed: tuple[str, Path], tmp_path: Path) -> None:
    """Which is what a user has who cloned the repository there."""
    _, python = installed
    (tmp_path / "ringflash").mkdir()
    run(python, "-c", "import ringflash; ringflash.ContextParallel", cwd=tmp_path)
    assert "usage" in run(python, "-m", "ringflash.cli", "--help", cwd=tmp_path)


def test_a_package_called_kernels_is_not_hidden(installed: tuple[str, Path], tmp_path: Path) -> None:
    """transformers imports one of that name; it is found wherever it stands on sys.path."""
    _, python = installed
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True")
    last = "import sys, pathlib; sys.path.append(sys.argv[1]); import kernels; assert kernels.real"
    run(python, "-c", last, tmp_path, cwd=python.parent)
    run(python, "-c", f"import ringflash.kernels.reference; {last}", tmp_path, cwd=python.parent)


def test_uninstalled(source: Path, tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "venv")
    file = run(python, "-c", CODE, cwd=tmp_path, PYTHONPATH=str(source)).split("|")[0]
    assert Path(file).is_relative_to(source)
    assert "usage" in run(python, "-m", "ringflash.cli", "--help", cwd=tmp_path, PYTHONPATH=str(source))
    found = run(python, "-m", "ringflash.cli", "--version", cwd=tmp_path, PYTHONPATH=str(source))
    assert found.startswith("ringflash ")
