"""The Hopper kernels compile for sm_90 on a machine that has none: no spills, no serialised products, the copy engine used.

Runs with any Triton that has Gluon: python -m pytest tests/test_hopper_compile.py in an environment with torch, triton, pytest.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import kernel_cases
import pytest
import triton

gluon = pytest.importorskip("triton.experimental.gluon._runtime")
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402

from ringflash.kernels.hopper import backward, config, forward, support  # noqa: E402

PARTS: dict[str, Any] = {"forward": forward, "backward": backward}
# What each part is made of: products by warpgroup, loads and stores (or additions) of whole tiles by the copy engine.
INSTRUCTIONS = {"forward": ("HGMMA", "UTMALDG", "UTMASTG"), "backward": ("HGMMA", "UTMALDG", "UTMAREDG")}
WIDE = re.compile(r"\S+ (192|256)/")  # no room for a stage to store from
TRITON = ".".join(triton.__version__.split(".")[:2])
# Bytes of spill stores by (triton, part, configuration), as measured; what is not named here: none. The forward's lie outside
# the loops over key blocks: in the copy warp, and where an item begins and ends. Head dim 256 has no room for a carried
# accumulator.
VARIANTS = ("plain", "exact", "carried", "to state", "three segments")
FORWARD = {
    ("3.6", "64/64"): (8, 0, 8, 0, 60),
    ("3.6", "128/128"): (28, 4, 48, 36, 160),
    ("3.6", "192/128"): (68, 48, 72, 68, 100),
    ("3.6", "256/256"): (176, 72, 1248, 180, 1456),
    ("3.8", "64/64"): (0, 4, 0, 0, 76),
    ("3.8", "128/128"): (112, 8, 184, 144, 304),
    ("3.8", "192/128"): (68, 48, 72, 68, 112),
    ("3.8", "256/256"): (296, 88, 1300, 300, 1208),
}
SPILLS: dict[tuple[str, str, str], int] = {
    (version, "forward", f"{dtype} {headdims} {name}"): spilled
    for dtype in ("bfloat16", "float16")
    for (version, headdims), each in FORWARD.items()
    for name, spilled in zip(VARIANTS, each, strict=True)
}
# Products that wait for each other, which is slower than it need be; the cause was not found.
SERIALISED = {("3.8", "forward", f"float16 64/64 {name}") for name in VARIANTS}

CONFIGURATIONS = [(part, name) for part, module in PARTS.items() for name, *_ in module.sources()]
# Every variant of what matters most, each head dim once, float16 once; on a Triton where the kernels are on request, two
# variants of that. The others with --full.
MOST = (
    r"bfloat16 (128|\S+ plain)|float16 128\S* plain"
    if TRITON in support.TESTED
    else r"bfloat16 (128\S* (plain|three)|\S+ plain)"
)
OFTEN = [x for x in CONFIGURATIONS if re.match(MOST, x[1])]
SELDOM = [x for x in CONFIGURATIONS if x not in OFTEN]


class Built(NamedTuple):
    """What is looked at of a compiled kernel: its shared memory, ptxas' words about it and its machine code."""

    shared: int
    log: str
    sass: str


def spilled(log: str) -> int:
    """Bytes of spill stores that ptxas -v tells of; a log that tells nothing is an error."""
    found = re.findall(r"(\d+) bytes spill stores", log)
    assert found, f"not what ptxas -v says: {log[:500]}"
    return sum(map(int, found))


def warnings(log: str) -> list[str]:
    """ptxas' remarks that products of warpgroups wait for each other (C7510 and those around it)."""
    return re.findall(r"\(C75\d\d\).*", log)


def missing(sass: str, instructions: tuple[str, ...]) -> set[str]:
    """Which instructions a disassembly does not have."""
    return {name for name in instructions if not re.search(rf"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\d+ )?{name}\b", sass, re.MULTILINE)}


def build(part: str, name: str) -> Built:
    """Compile one configuration, as at run time, and look at it."""
    fn, signature, constants, options = next(rest for found, *rest in PARTS[part].sources() if found == name)
    source = gluon.GluonASTSource(fn, signature, constants)
    compiled = triton.compile(source, target=kernel_cases.TARGETS["sm_90"], options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        more = str(options.get("ptx_options", "")).split()
        if tuple(map(int, TRITON.split("."))) >= (3, 8):
            more.append("--regAllocOptLevel=2")  # Triton's own choice since then
        log = run(get_ptxas(90).path, "-v", *more, "--gpu-name=sm_90a", ptx, "-o", os.devnull)
        return Built(compiled.metadata.shared, log, run(tool("nvdisasm"), "-c", cubin))


def run(*command: object) -> str:
    """Both outputs of a command that must succeed."""
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def tool(name: str) -> Path:
    """One of the CUDA tools inside the triton package."""
    return next(Path(str(triton.__file__)).parent.rglob(f"{name}*"))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[Built]]]:
    """The configurations that the selected tests ask for, in as many processes as there are processors to this one."""
    chosen = {_parameters(item).get("configuration") for item in request.session.items}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        yield {x: pool.submit(build, *x) for x in CONFIGURATIONS if x in chosen}


def _parameters(item: Any) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") and item.path == Path(__file__) else {}


def check(configuration: tuple[str, str], built: Built, *, tested: bool = TRITON in support.TESTED) -> None:
    """tested: the kernels are the default on this Triton; elsewhere they need only run, however slowly."""
    part, name = configuration
    shared, log, sass = built
    bound = SPILLS.get((TRITON, part, name), 0)
    if tested:
        assert spilled(log) <= bound, f"({TRITON!r}, {part!r}, {name!r}): {spilled(log)}"
        assert not warnings(log) or (TRITON, part, name) in SERIALISED
    assert not missing(sass, INSTRUCTIONS[part][: 2 if part == "forward" and WIDE.match(name) else 3])
    assert shared <= kernel_cases.SHARED_LIMIT["sm_90"]


@pytest.mark.skipif(kernel_cases.INTERPRETED, reason="an interpreted kernel is not compiled")
@pytest.mark.parametrize("configuration", OFTEN, ids=" ".join)
def test_configuration(built: dict[tuple[str, str], Future[Built]], configuration: tuple[str, str]) -> None:
    check(configuration, built[configuration].result())


@pytest.mark.slow(sample=0)
@pytest.mark.skipif(kernel_cases.INTERPRETED, reason="an interpreted kernel is not compiled")
@pytest.mark.parametrize("configuration", SELDOM, ids=" ".join)
def test_other_configuration(built: dict[tuple[str, str], Future[Built]], configuration: tuple[str, str]) -> None:
    check(configuration, built[configuration].result())


def test_each_part_has_configurations_with_names_of_their_own() -> None:
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS)
    assert {part for part, _ in OFTEN} == set(PARTS)
    known = {(part, name) for _, part, name in SPILLS}
    assert known <= set(CONFIGURATIONS), "a bound for what is not compiled"


def test_the_table_of_what_runs_is_that_of_what_is_compiled() -> None:
    assert set(support.HEADDIMS["forward"]) == set(config.FORWARD)
    assert set(support.HEADDIMS["backward"]) == {(headdim, headdim) for headdim in config.BACKWARD}


# The checks themselves, on what they must tell apart

LOG = """ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
"""
WARNING = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient "
    "register resources for the wgmma pipeline in the function 'kernel'\n"
)
SASS = """        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0020*/              @!UP0 UTMALDG.4D [UR8], [UR6] ;
        /*0030*/                   UTMAREDG.4D.ADD [UR8], [UR6] ;
.L_HGMMA:
"""


def test_spills_are_read() -> None:
    assert spilled(LOG.format(stack=0, stores=0, loads=0)) == 0
    assert spilled(LOG.format(stack=144, stores=168, loads=204)) == 168
    assert spilled(LOG.format(stack=8, stores=8, loads=8) * 2) == 16
    with pytest.raises(AssertionError, match="not what ptxas -v says"):
        spilled("ptxas fatal   : Unresolved extern function")


@pytest.mark.parametrize("code", range(7510, 7520))
def test_serialisation_is_seen(code: int) -> None:
    log = LOG.format(stack=0, stores=0, loads=0)
    assert not warnings(log)
    (found,) = warnings(WARNING.replace("7510", str(code)) + log)
    assert found.startswith(f"(C{code}) Potential Performance Loss")


def test_missing_instructions_are_seen() -> None:
    assert not missing(SASS, ("HGMMA", "UTMALDG", "UTMAREDG"))
    assert missing(SASS, INSTRUCTIONS["forward"]) == {"UTMASTG"}
    assert missing(".L_HGMMA:\n", ("HGMMA",)) == {"HGMMA"}
    assert missing(SASS.replace("UTMALDG", "LDG"), INSTRUCTIONS["backward"]) == {"UTMALDG"}


def test_check_fails_for_each() -> None:
    right = Built(1000, LOG.format(stack=0, stores=0, loads=0), SASS)
    key = ("backward", "a name")
    check(key, right, tested=True)
    check(key, right._replace(log=LOG.format(stack=8, stores=8, loads=8)), tested=False)
    for wrong in (
        right._replace(shared=(227 << 10) + 1),
        right._replace(log=LOG.format(stack=8, stores=8, loads=8)),
        right._replace(log=WARNING + right.log),
        right._replace(sass=SASS.replace("HGMMA", "HMMA")),
    ):
        with pytest.raises(AssertionError):
            check(key, wrong, tested=True)
