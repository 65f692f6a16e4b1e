"""Rules of the tree that a machine can hold: the import table, sizes, names, docstrings, and one test file per module."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {  # imports point one way: module or package -> what it may import of ringflash
    "mask": "",
    "layout": "mask",
    "stats": "kernels",
    "options": "",
    "intervals": "layout mask",
    "schedules": "",
    "plan": "intervals layout mask schedules transport.blocks",
    "kernels": "",
    "launch": "",
    "transport.blocks": "",
    "transport.symmetric": "transport.blocks",
    "transport.communicator": "",
    "transport.p2p": "transport.blocks transport.communicator",
    "transport.publishing": "transport.blocks",
    "transport.nvlink": "transport.blocks transport.communicator transport.publishing transport.symmetric",
    "transport.gathered": "transport.blocks transport.communicator",
    "tile": "kernels",
    "ring": "plan stats transport.blocks",  # plan, transport.blocks: the types of what comes as an argument
    "shares": "",
    "heads": "layout mask plan ring shares transport.blocks",
    "autograd": "heads ring plan tile transport",
    "checks": "layout mask options",
    "agreement": "",
    "auto": "options schedules transport.blocks",
    "api": "agreement auto autograd checks heads layout mask options plan ring tile transport",
    "rates": "",
    "steps": "plan rates",
    "explain": "steps auto checks heads layout mask options plan schedules shares tile",
    "context": "agreement api checks layout mask options transport",
    "__init__": "api context explain layout mask options stats",
}
ABOVE = ("cli", "demo", "integrations")  # import anything; nothing else imports them
DISTRIBUTED = ("transport", "launch", "api", "context", *ABOVE)  # who may know torch.distributed
TOP = {"ringflash", "kernels", "launch", "tests", "benchmarks", "pyproject.toml", "README.md", "LICENSE"}
TOGETHER = {"q", "k", "v"}  # count as one argument
# The tile contract (kernels/README.md) gives these their arguments
CONTRACT = {
    "forward",
    "backward",
    "lookup",
    "launch",
    "launch_dq",
    "launch_dkv",
    "Ring.backward",
    "Heads.backward",
    "TileLike.forward",
    "TileLike.backward",
}

PYTHON = sorted(p for top in ("ringflash", "kernels", "launch", "tests", "benchmarks") for p in (ROOT / top).rglob("*.py"))
FILES = sorted({p.resolve().relative_to(ROOT).as_posix() for p in PYTHON})


def _modules() -> dict[str, Path]:
    """Every module of the package by its name below ringflash ("transport.p2p"); a package goes by "transport.__init__"."""
    package = ROOT / "ringflash"
    found = [*package.rglob("*.py"), *(package / "kernels").glob("**/*.py"), *(package / "launch").glob("**/*.py")]
    return {".".join(p.relative_to(package).with_suffix("").parts): p for p in sorted(set(found))}


MODULES = _modules()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {_module_of(node.module or "", alias.name) for alias in node.names}
    return names


def _module_of(module: str, name: str) -> str:
    """`from module import name` imports the module `module.name`, if there is one."""
    below = f"{module}.{name}".removeprefix("ringflash.")
    is_module = module.split(".")[0] == "ringflash" and (
        below in MODULES or f"{below}.__init__" in MODULES or below in ("kernels",)
    )
    return f"{module}.{name}" if is_module or f"{module}.{name}" == "torch.distributed" else module


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def layer(module: str) -> str:
    """The entry of LAYERS that speaks for a module."""
    return next((entry for entry in LAYERS if within(module, (entry,))), module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    if within(module, ABOVE) or module == "transport.__init__":
        return
    assert layer(module) in LAYERS, f"{module} has no place in the import table"
    allowed = (layer(module), *LAYERS[layer(module)].split())
    ours = {name for name in imported(MODULES[module]) if within(name, ("ringflash",))}
    wrong = {name for name in ours if not within(name.removeprefix("ringflash."), allowed)}
    assert not wrong, f"{module} may import {allowed}"


@pytest.mark.parametrize("module", [m for m in MODULES if not within(m, DISTRIBUTED)])
def test_only_some_know_torch_distributed(module: str) -> None:
    assert not {name for name in imported(MODULES[module]) if within(name, ("torch.distributed",))}


@pytest.mark.parametrize("module", [m for m in MODULES if not within(m, ("kernels",))])
def test_only_kernels_know_triton(module: str) -> None:
    assert not {name for name in imported(MODULES[module]) if within(name, ("triton",))}


@pytest.mark.parametrize("file", FILES)
def test_files_are_short_and_open_with_a_sentence(file: str) -> None:
    text = (ROOT / file).read_text()
    assert text.count("\n") <= 400
    doc = ast.get_docstring(ast.parse(text)) or ""
    opening = " ".join(doc.split("\n\n")[0].split())
    assert re.fullmatch(r"(?:(?![.?!] [A-Z]).)+[.:]", opening), (
        f"a file opens with one sentence that says what it owns: {opening}"
    )


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__init__")])
def test_every_module_has_its_test_file(module: str) -> None:
    tests = {p.name for p in (ROOT / "tests").glob("test_*.py")}
    if within(module, (*ABOVE, "kernels.hopper")):  # commands, and kernels that only a GPU runs: modules may share a file
        assert fnmatch.filter(tests, f"test_{module.removeprefix('kernels.').split('.')[0]}*.py")
    else:
        assert f"test_{module.replace('__main__', 'main').replace('.', '_')}.py" in tests


@pytest.mark.parametrize("folder", ["kernels", "launch"])
def test_kernels_and_launch_are_folders_reached_through_symlinks(folder: str) -> None:
    link = ROOT / "ringflash" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert not list((ROOT / folder).rglob("__init__.py")), "a top-level package would shadow another of that name"


def test_nothing_else_at_the_top() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    entries = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert {name for name in entries - TOP if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)} == set()
    assert entries >= TOP


def functions(body: list[ast.stmt], owner: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """Public functions and methods, by name; those of autograd Functions, whose arguments torch fixes, left out."""
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef) and not any("Function" in ast.unparse(base) for base in node.bases):
            found += functions(node.body, f"{node.name}.")
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
            found.append((owner + node.name, node))
    return [(name, node) for name, node in found if not any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_take_three_positional_arguments_at_most(module: str) -> None:
    for name, node in functions(parse(MODULES[module]).body):
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
        count = len(arguments) - (2 if set(arguments) >= TOGETHER else 0)
        assert count <= 3 or name in CONTRACT, f"{module}.{name}({', '.join(arguments)}): the rest keyword-only"
