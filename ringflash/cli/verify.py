"""`ringflash verify`: the ring's out, lse, dq, dk, dv against a float64 oracle, beside the error of the single-rank kernel."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ringflash import checks
from ringflash import layout as layouts
from ringflash.api import attend_over
from ringflash.auto import Facts, route
from ringflash.cli import oracle
from ringflash.cli.ending import Refused, ending, launched
from ringflash.cli.oracle import Results
from ringflash.launch import local
from ringflash.launch.world import launcher
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import CHOICES, Options
from ringflash.transport.communicator import Communicator, communicator

CPU_RANKS = 2
ROWS_WANTED, MOST_DRAWS = 4096, 200  # rows (of all heads) that an rms is taken over, and draws of the inputs to get them
ALLOWED = 1.05  # the ring's rms error may be this many times the single kernel's, beside ROUNDING
# Merging `size` blocks rounds a few times more often than one kernel does. That is lost among the roundings of a long
# row's own keys, but not where a row has hardly more keys than there are blocks.
ROUNDING = torch.finfo(torch.float32).eps
BOUND = f"ring rms at most {ALLOWED} x single rms + ranks / seqlen x float32 eps x rms of the exact values"
MASK_WORDS = (
    "words joined by +: full, causal, window:LEFT,RIGHT (one side may be empty), documents:0,...,SEQLEN (cumulative lengths), "
    "prefix:N"
)
MOST_BORDERS = 12  # documents' borders that a title names
LAYOUTS: dict[str, Callable[[Mask, int, int], Layout]] = {
    **{name: (lambda mask, seqlen, size, name=name: layouts.named(name, seqlen, size)) for name in layouts.NAMES},
    "per_document": lambda mask, seqlen, size: layouts.per_document("zigzag", mask.documents or (0, seqlen), size),
    "balanced": layouts.balanced,
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One shape to verify."""

    layout: str
    mask: Mask
    seqlen: int
    batch: int
    heads: tuple[int, int]
    headdims: tuple[int, int]
    dtype: str
    schedule: str
    seed: int
    transport: str = "auto"
    reproducible: bool = False

    @property
    def options(self) -> Options:
        """How the ring runs."""
        return Options(schedule=self.schedule, transport=self.transport, reproducible=self.reproducible)


@dataclass(frozen=True)
class Line:
    """One quantity's errors: root mean square and largest, of the ring and of the single-rank kernel.

    merging: what the ring's rms may be above ALLOWED times the single kernel's, see ROUNDING.
    """

    name: str
    ring_rms: float
    single_rms: float
    ring_max: float
    single_max: float
    merging: float

    @property
    def allowed(self) -> float:
        """The largest rms error that the ring may have: BOUND."""
        return ALLOWED * self.single_rms + self.merging

    @property
    def good(self) -> bool:
        """Whether the ring keeps it; a NaN does not."""
        return self.ring_rms <= self.allowed


def main(argv: Sequence[str] | None = None) -> int:
    """Verify on this launch's ranks, or on --nproc ranks of this host; 0 if every case holds."""
    args = _parser().parse_args(argv)
    return ending("ringflash verify", lambda: _run_all(args))


def _run_all(args: argparse.Namespace) -> int:
    """Verify what the arguments ask for. Raises Refused for arguments that contradict each other or the machine."""
    alone = launcher() == "single"
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    nproc = args.nproc if args.nproc is not None else torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    try:
        cases = [_case(args, layout, mask) for layout in args.layout for mask in args.mask]
        if alone:
            local.require_ranks(nproc, device)
        elif args.nproc is not None:
            raise ValueError("--nproc is for one host; here the launcher (torchrun, mpiexec, srun) has set the number of ranks")
        if alone:
            _route(args, nproc, device)
    except (ValueError, NotImplementedError) as error:
        raise Refused(str(error)) from error
    return local.run(run_rank, nproc, (cases,), device=device)[0] if alone else run_rank(cases, args.device)


def _route(args: argparse.Namespace, size: int, device: str) -> None:
    """Raise where no transport can do what is asked for on this host, before ranks are started that would."""
    options = Options(schedule=args.schedule, transport=args.transport, reproducible=args.reproducible)
    heads = checks.heads_ranks(options.transport, checks.mesh(None, size))
    route(options, Facts(size, (0,) * size, device, buffer_bytes=0, heads=heads))


def run_rank(cases: list[Case], device: str | None = None) -> int:
    """One rank's part of all cases; rank 0 prints. The same exit status on every rank."""
    with launched(device) as session:
        ring, console = communicator(), Console()
        good = True
        for case in cases:
            lines = verify(case, ring, session.device)
            good = good and all(line.good for line in lines)
            if ring.rank == 0:
                console.print(_title(case, ring.size, session.device), soft_wrap=True, highlight=False)
                console.print(_table(lines))
        if ring.rank == 0:
            verdict = "[green]all within bounds[/]" if good else "[red]NOT within bounds[/]"
            console.print(f"{verdict}: {BOUND}", soft_wrap=True, highlight=False)
    return 0 if good else 1


def verify(case: Case, ring: Communicator, device: torch.device) -> list[Line]:
    """Errors of the ring and of a ring of one, on every rank (all compute the same).

    Short sequences are drawn several times: an rms over a handful of rows says nothing to within five percent.
    """
    rows = case.batch * case.seqlen * case.heads[0]
    draws = range(case.seed, case.seed + min(MOST_DRAWS, -(-ROWS_WANTED // max(1, rows))))
    compared = [_compare(replace(case, seed=seed), ring, device) for seed in draws]
    share = ring.size / max(1, case.seqlen)
    return [_line(name, *(torch.stack(x) for x in zip(*one, strict=True)), share=share) for name, one in _by_name(compared)]


def _compare(case: Case, ring: Communicator, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(ring's, single kernel's, exact) of each quantity, for one draw of the inputs."""
    whole = _inputs(case, device)
    layout = LAYOUTS[case.layout](case.mask, case.seqlen, ring.size)
    part = [layout.part(x, ring.rank, 2 if x.dim() == 3 else 1) for x in whole]
    mine = _run(part, ring, layout, case)
    ringed = [layout.join(ring.gather(x, d, layout.lengths), d) for x, d in zip(mine, (1, 2, 1, 1, 1), strict=True)]
    single = _run(whole, Communicator(0, 1, (0,)), layouts.contiguous(case.seqlen, 1), case)
    q, k, v, dout, dlse = whole
    return list(zip(ringed, single, oracle.attention(q, k, v, mask=case.mask, dout=dout, dlse=dlse), strict=True))


def _by_name(compared: list[list[tuple[Tensor, Tensor, Tensor]]]) -> list[tuple[str, list[tuple[Tensor, Tensor, Tensor]]]]:
    return [(name, [draw[i] for draw in compared]) for i, name in enumerate(Results._fields)]


def _inputs(case: Case, device: torch.device) -> list[Tensor]:
    """q, k, v, dout, dlse of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    (nheads_q, nheads_k), (headdim, headdim_v) = case.heads, case.headdims
    shapes = [(nheads_q, headdim), (nheads_k, headdim), (nheads_k, headdim_v), (nheads_q, headdim_v)]
    made = [torch.randn(case.batch, case.seqlen, *shape, generator=generator) for shape in shapes]
    dlse = torch.randn(case.batch, nheads_q, case.seqlen, generator=generator)
    return [x.to(device, DTYPES[case.dtype]) for x in made] + [dlse.to(device)]


def _run(inputs: Sequence[Tensor], comm: Communicator, layout: Layout, case: Case) -> Results:
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    dout, dlse = inputs[3:]
    given = checks.Given(layout, mask=case.mask, options=case.options)
    out, lse = attend_over(comm, (q, k, v), given, return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    return Results(out.detach(), lse.detach(), *grads)


def _line(name: str, ringed: Tensor, single: Tensor, exact: Tensor, *, share: float) -> Line:
    """share: ranks / seqlen."""

    def errors(x: Tensor) -> tuple[float, float]:
        off = torch.where(x.double() == exact, 0.0, x.double() - exact)  # empty rows: -inf is -inf
        return off.square().mean().sqrt().item() if off.numel() else 0.0, off.abs().max().item() if off.numel() else 0.0

    (ring_rms, ring_max), (single_rms, single_max) = errors(ringed), errors(single)
    finite = exact[exact.isfinite()]
    values = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    return Line(name, ring_rms, single_rms, ring_max, single_max, merging=share * ROUNDING * values)


def _title(case: Case, size: int, device: torch.device) -> str:
    shape = f"seqlen {case.seqlen}, heads {case.heads[0]}/{case.heads[1]}, headdim {case.headdims[0]}/{case.headdims[1]}"
    ranks = f"{size} rank" if size == 1 else f"{size} ranks"
    return f"[bold]{case.layout}, {_words(case.mask)}[/], {case.dtype}, {shape}, {ranks} on {device.type}"


def _table(lines: list[Line]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("", "ring rms", "allowed", "single rms", "ratio", "ring max", "single max", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for x in lines:
        ratio = _ratio(x.ring_rms, x.single_rms)
        numbers = (f"{n:.2e}" for n in (x.ring_rms, x.allowed, x.single_rms, x.ring_max, x.single_max))
        ring_rms, allowed, single_rms, ring_max, single_max = numbers
        verdict = "ok" if x.good else "[red]WORSE[/]"
        table.add_row(x.name, ring_rms, allowed, single_rms, ratio, ring_max, single_max, verdict)
    return table


def _ratio(a: float, b: float) -> str:
    """Short, also where it is large: a table wider than the screen would lose its last column, the verdict."""
    return "-" if not b else f"{a / b:.3f}" if a < 100 * b else f"{a / b:.1e}"


def _words(mask: Mask) -> str:
    words = ["causal"] if mask.causal else []
    words += [f"window {mask.window}"] if mask.window else []
    words += [_borders(mask.document_rows(0)[0].tolist())] if mask.documents else []
    words += [f"prefix {mask.prefix}"] if mask.prefix is not None else []
    return " + ".join(words) or "full"


def _borders(cumulative: list[int]) -> str:
    if len(cumulative) > MOST_BORDERS:
        return f"{len(cumulative) - 1} documents"
    return f"documents {','.join(map(str, cumulative))}"


def parse_mask(text: str, seqlen: int) -> Mask:
    """A mask from words joined by +: full, causal, window:LEFT,RIGHT (one side may be empty), documents:0,...,SEQLEN, prefix:N.

    Documents are cumulative lengths, as in Mask. Raises ValueError in words: its own, Mask's and check_seqlen's.
    """
    given: dict = {}
    for word in text.split("+"):
        name, _, value = word.partition(":")
        try:
            found = _MASK_WORDS[name](value)
        except (KeyError, ValueError) as error:
            raise ValueError(f"mask must be {MASK_WORDS}; cannot read {word!r} in {text!r}") from error
        if found.keys() & given.keys():
            raise ValueError(f"mask must say {name} once: {text!r}; drop one of them")
        given |= found
    mask = Mask(**given)
    mask.check_seqlen(seqlen)
    return mask


def _plain(**found: bool) -> Callable[[str], dict]:
    """A word that takes no value."""

    def read(value: str) -> dict:
        if value:
            raise ValueError(f"takes no value: {value!r}")
        return found

    return read


def _window(value: str) -> dict:
    sides = [int(side) if side else None for side in value.split(",")]
    if len(sides) > 2 or set(sides) == {None}:
        raise ValueError(f"needs one number or two: {value!r}")
    return {"window": (*sides, None)[:2]}


_MASK_WORDS: dict[str, Callable[[str], dict]] = {
    "full": _plain(),
    "causal": _plain(causal=True),
    "window": _window,
    "documents": lambda value: {"documents": tuple(map(int, value.split(",")))},
    "prefix": lambda value: {"prefix": int(value)},
}


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    try:
        return int(first), int(second or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"two whole numbers, as 4/2, or one for both: {text!r}") from None


def _case(args: argparse.Namespace, layout: str, mask: str) -> Case:
    (nheads_q, nheads_k), (headdim, headdim_v) = args.heads, args.headdim
    for name, value, least in (("seqlen", args.seqlen, 0), ("batch", args.batch, 1), ("heads", min(args.heads), 1)):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}: {value}")
    shapes = ((nheads_q, headdim), (nheads_k, headdim), (nheads_k, headdim_v))
    checks.tensors(*(torch.empty(args.batch, args.seqlen, *x, device="meta") for x in shapes), meta=True)
    return Case(
        layout=layout,
        mask=parse_mask(mask, args.seqlen),
        seqlen=args.seqlen,
        batch=args.batch,
        heads=(nheads_q, nheads_k),
        headdims=(headdim, headdim_v),
        dtype=args.dtype,
        schedule=args.schedule,
        seed=args.seed,
        transport=args.transport,
        reproducible=args.reproducible,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringflash verify",
        description="Compare the ring's out, lse, dq, dk, dv with a float64 oracle, beside the single-rank kernel's error. "
        f"Exit status 1 when the ring is worse than allowed: {BOUND} (the last term counts only for a handful of tokens).",
        epilog="example: ringflash verify --nproc 3 --seqlen 2999 --layout zigzag striped --mask causal+window:256 "
        "causal+documents:0,100,700,2999. Under torchrun, mpiexec or srun: python -m ringflash.cli verify ...",
    )
    parser.add_argument("--nproc", type=int, help="ranks on this host (default: all visible GPUs, else 2)")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["zigzag"], help="layouts to verify")
    parser.add_argument("--mask", nargs="+", default=["causal"], help=f"masks: {MASK_WORDS}")
    parser.add_argument("--seqlen", type=int, default=1000, help="global tokens (default 1000)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=_pair, default=(4, 2), metavar="Q/K", help="query and key heads (default 4/2)")
    parser.add_argument("--headdim", type=_pair, default=(64, 64), metavar="D/DV", help="head dimensions (default 64/64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--schedule", choices=CHOICES["schedule"], default="auto")
    parser.add_argument("--transport", choices=CHOICES["transport"], default="auto")
    parser.add_argument("--reproducible", action="store_true", help="bits that do not depend on the ring's size and layout")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs where there are some")
    parser.add_argument("--seed", type=int, default=0)
    return parser
