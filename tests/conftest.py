"""What every test runs under: few threads, poisoned uninitialised memory, workers by world size, and bounded sweeps."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from pool import MAKERS, Pools, poisoned

from ringflash.launch.bootstrap import Session, bootstrap

SAMPLE = 8  # of a slow test's parameter sets, how many run without --full

settings.register_profile("bounded", deadline=None, derandomize=True, database=None)
settings.register_profile("full", deadline=None, database=None, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long sweeps whole instead of a sample with a fixed seed")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "bounded")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if not config.getoption("--full"):
        dropped = _beyond_sample(items)
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]
    items.sort(key=lambda item: item.get_closest_marker("gpu") is not None)  # behind all that want no process group


def _beyond_sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """The slow tests that do not run: of each function all but slow(sample=...) parameter sets, picked with a fixed seed."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    dropped = []
    for name, sets in functions.items():
        marker = sets[0].get_closest_marker("slow")
        n = marker.kwargs.get("sample", SAMPLE) if marker else SAMPLE
        dropped += random.Random(name).sample(sets, max(0, len(sets) - n))
    return dropped


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in MAKERS:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether long sweeps run whole."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """pools.run(size, fn, *args): fn on every rank of a gloo world of that size."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    """This process as a rank on a GPU, for GPU tests: in one process group, which lasts to the end."""
    with bootstrap(device="cuda", timeout=120) as session:
        yield session
