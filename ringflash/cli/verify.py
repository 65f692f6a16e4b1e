"""`ringflash verify`: the ring's out, lse, dq, dk, dv against a float64 oracle, beside the error of the single-rank kernel."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ringflash import checks
from ringflash import layout as layouts
from ringflash.api import attend_over
from ringflash.cli import oracle
from ringflash.cli.oracle import Results
from ringflash.launch import bootstrap, local
from ringflash.launch.world import launcher
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.transport.communicator import Communicator, communicator

ROWS_WANTED, MOST_DRAWS = 4096, 200  # rows (of all heads) that an rms is taken over, and draws of the inputs to get them
ALLOWED = 1.05  # the ring's rms error may be this many times the single kernel's
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


@dataclass(frozen=True)
class Line:
    """One quantity's errors: root mean square and largest, of the ring and of the single-rank kernel."""

    name: str
    ring_rms: float
    single_rms: float
    ring_max: float
    single_max: float
    floor: float

    @property
    def good(self) -> bool:
        """Whether the ring is no worse than ALLOWED times the single kernel (or than the rounding of the last bit)."""
        return self.ring_rms <= max(ALLOWED * self.single_rms, self.floor)


def main(argv: Sequence[str] | None = None) -> int:
    """Verify on this launch's ranks, or on --nproc ranks of this host; 0 if every case holds."""
    args = _parser().parse_args(argv)
    try:
        cases = [_case(args, layout, mask) for layout in args.layout for mask in args.mask]
        if launcher() == "single":
            nproc = args.nproc if args.nproc is not None else torch.cuda.device_count() or 2
            return local.run(run_rank, nproc, (cases,), device=args.device)[0]
        if args.nproc is not None:
            raise ValueError("--nproc is for one host; here the launcher (torchrun, mpiexec, srun) has set the number of ranks")
    except ValueError as error:
        print(f"ringflash verify: {error}", file=sys.stderr)
        return 2
    return run_rank(cases, args.device)


def run_rank(cases: list[Case], device: str | None = None) -> int:
    """One rank's part of all cases; rank 0 prints. The same exit status on every rank."""
    with bootstrap.bootstrap(device=device) as session:
        ring, console = communicator(), Console()
        good = True
        for case in cases:
            lines = verify(case, ring, session.device)
            good = good and all(line.good for line in lines)
            if ring.rank == 0:
                console.print(_table(case, lines, ring.size, session.device))
        if ring.rank == 0:
            console.print("[green]all within bounds[/]" if good else f"[red]worse than {ALLOWED} x the single kernel[/]")
    return 0 if good else 1


def verify(case: Case, ring: Communicator, device: torch.device) -> list[Line]:
    """Errors of the ring and of a ring of one, on every rank (all compute the same).

    Short sequences are drawn several times: an rms over a handful of rows says nothing to within five percent.
    """
    rows = case.batch * case.seqlen * case.heads[0]
    draws = range(case.seed, case.seed + min(MOST_DRAWS, -(-ROWS_WANTED // max(1, rows))))
    compared = [_compare(replace(case, seed=seed), ring, device) for seed in draws]
    return [_line(name, *(torch.stack(x) for x in zip(*one, strict=True))) for name, one in _by_name(compared)]


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
    given = checks.Given(layout, mask=case.mask, options=Options(schedule=case.schedule))
    out, lse = attend_over(comm, (q, k, v), given, return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    return Results(out.detach(), lse.detach(), *grads)


def _line(name: str, ringed: Tensor, single: Tensor, exact: Tensor) -> Line:
    def errors(x: Tensor) -> tuple[float, float]:
        off = torch.where(x.double() == exact, 0.0, x.double() - exact)  # empty rows: -inf is -inf
        return off.square().mean().sqrt().item() if off.numel() else 0.0, off.abs().max().item() if off.numel() else 0.0

    (ring_rms, ring_max), (single_rms, single_max) = errors(ringed), errors(single)
    finite = exact[exact.isfinite()]
    size = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    return Line(name, ring_rms, single_rms, ring_max, single_max, floor=size * torch.finfo(torch.float32).eps / 2)


def _table(case: Case, lines: list[Line], size: int, device: torch.device) -> Table:
    shape = f"seqlen {case.seqlen}, heads {case.heads[0]}/{case.heads[1]}, headdim {case.headdims[0]}/{case.headdims[1]}"
    table = Table(title=f"{case.layout}, {_words(case.mask)}, {case.dtype}, {shape}, {size} ranks on {device.type}")
    for column in ("", "ring rms", "single rms", "ratio", "ring max", "single max", ""):
        table.add_column(column, justify="right")
    for x in lines:
        ratio = f"{x.ring_rms / x.single_rms:.3f}" if x.single_rms else "-"
        numbers = (f"{n:.2e}" for n in (x.ring_rms, x.single_rms, x.ring_max, x.single_max))
        ring_rms, single_rms, ring_max, single_max = numbers
        table.add_row(x.name, ring_rms, single_rms, ratio, ring_max, single_max, "ok" if x.good else "[red]WORSE[/]")
    return table


def _words(mask: Mask) -> str:
    words = ["causal"] if mask.causal else []
    words += [f"window {mask.window}"] if mask.window else []
    words += [f"{len(mask.document_rows(0)[0]) - 1} documents"] if mask.documents else []
    words += [f"prefix {mask.prefix}"] if mask.prefix else []
    return " + ".join(words) or "full"


def parse_mask(text: str, seqlen: int) -> Mask:
    """A mask from words joined by +: full, causal, window:LEFT,RIGHT (a side may be empty), documents:LENGTH,..., prefix:N.

    The last document is filled up to seqlen. Raises ValueError in words.
    """
    given: dict = {}
    for word in text.split("+"):
        name, _, value = word.partition(":")
        try:
            given |= _MASK_WORDS[name](value, seqlen)
        except (KeyError, ValueError) as error:
            raise ValueError(
                "mask must be words joined by +: full, causal, window:LEFT,RIGHT, documents:LENGTH,..., prefix:N; "
                f"cannot read {word!r} in {text!r}"
            ) from error
    return Mask(**given)


def _window(value: str, seqlen: int) -> dict:
    left, right = ([*value.split(","), ""])[:2]
    return {"window": (int(left) if left else None, int(right) if right else None)}


def _documents(value: str, seqlen: int) -> dict:
    ends = [0]
    for length in value.split(","):
        ends.append(min(seqlen, ends[-1] + int(length)))
    return {"documents": tuple(ends if ends[-1] == seqlen else [*ends, seqlen])}


_MASK_WORDS: dict[str, Callable[[str, int], dict]] = {
    "full": lambda value, seqlen: {},
    "causal": lambda value, seqlen: {"causal": True},
    "window": _window,
    "documents": _documents,
    "prefix": lambda value, seqlen: {"prefix": int(value)},
}


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    return int(first), int(second or first)


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
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringflash verify",
        description="Compare the ring's out, lse, dq, dk, dv with a float64 oracle, beside the single-rank kernel's error. "
        f"Exit status 1 when the ring's rms error is worse than {ALLOWED} x the single kernel's.",
        epilog="example: ringflash verify --nproc 3 --seqlen 2999 --layout zigzag striped --mask causal+window:256, "
        "causal+documents:100,700,1200. Under torchrun, mpiexec or srun: python -m ringflash.cli verify ...",
    )
    parser.add_argument("--nproc", type=int, help="ranks on this host (default: all visible GPUs, else 2)")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["zigzag"], help="layouts to verify")
    parser.add_argument("--mask", nargs="+", default=["causal"], help="masks: words joined by +, see the example")
    parser.add_argument("--seqlen", type=int, default=1000, help="global tokens (default 1000)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=_pair, default=(4, 2), metavar="Q/K", help="query and key heads (default 4/2)")
    parser.add_argument("--headdim", type=_pair, default=(64, 64), metavar="D/DV", help="head dimensions (default 64/64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--schedule", choices=("auto", "rotate", "direct"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs where there are some")
    parser.add_argument("--seed", type=int, default=0)
    return parser
