"""The `ringflash demo` command: its options, and the ranks it runs on."""

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

import ringflash as rf
from ringflash.cli.ending import Refused, ending, launched
from ringflash.demo.parts import CopyPart, Job, TextPart
from ringflash.launch import local
from ringflash.launch.world import launcher

CPU_RANKS = 2
DESCRIPTION = """\
Train a small language model with ring attention over several ranks, repeat the same steps on one rank, and compare;
then train a copy task whose source and target lie on different ranks. Exit status 1 when a check fails.

Starts its own ranks on this host. Under torchrun, mpiexec or srun it uses theirs:
  torchrun --nproc-per-node 4 -m ringflash.demo        mpiexec -n 4 python -m ringflash.demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 all checks passed, 1 one failed, 2 refused, 130 interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args, under_launcher=launcher() != "single")
    return ending(parser.prog, lambda: run(args) if launcher() != "single" else run_here(args))


def run_here(args: argparse.Namespace) -> int:
    """Run on ranks of this host."""
    device = device_type(args)
    nproc = args.nproc or (torch.cuda.device_count() if device == "cuda" else CPU_RANKS)
    try:
        local.require_ranks(nproc, device)
    except ValueError as error:
        raise Refused(str(error)) from error
    return max(local.run(run, nproc, (args,), device=device))


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="ringflash demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=at_least(1), metavar="N", help="ranks (default: all GPUs, or 2 on the CPU)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if any")
    parser.add_argument("--part", choices=("text", "copy", "both"), help="default: both; copy with --cut")
    parser.add_argument(
        "--cut",
        action="store_true",
        help="copy task with attention cut at the shards' borders: passes if accuracy stays near chance",
    )
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="text: training steps")
    parser.add_argument("--seqlen", type=at_least(2), metavar="N", help="text: bytes of one sequence, over all ranks")
    parser.add_argument("--layout", choices=rf.layouts.NAMES, help="text: default zigzag")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="text: draw both loss curves (needs matplotlib)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of weights and data (default 0)")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer not below `least`."""

    def integer(text: str) -> int:
        if not text.strip().lstrip("+-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}: {text!r}")
        return int(text)

    return integer


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, *, under_launcher: bool) -> None:
    """End with a usage error where options contradict each other or their surroundings; fill in --part."""
    if under_launcher and args.nproc is not None:
        parser.error(f"--nproc is the launcher's to say here: --nproc {args.nproc} under {launcher()}; leave it out")
    if args.cut and args.part == "text":
        parser.error("--cut is about the copy task: --part text leaves it out; drop one of them")
    args.part = args.part or ("copy" if args.cut else "both")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that PyTorch can see, and there is none; use --device cpu")
    if args.part == "copy":
        for name in ("steps", "seqlen", "layout", "plot"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} is about the text part, which is left out here; drop it or add --part both")
    if args.cut and args.nproc == 1:
        parser.error("--cut compares shards, and one rank has but one: use --nproc 2 or more")
    if args.plot is not None:
        check_plot(parser, args)


def check_plot(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error now where the picture could not be written after minutes of training."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.plot.suffix != ".png" or not args.plot.parent.is_dir():
        parser.error(f"--plot must name a .png file in a folder that exists: --plot {args.plot}")


def device_type(args: argparse.Namespace) -> Literal["cpu", "cuda"]:
    """What --device says, or for "auto" what there is."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return auto if args.device == "auto" else args.device


def run(args: argparse.Namespace) -> int:
    """What each rank does: returns the exit status, the same on all."""
    with launched(device_type(args)) as session:
        share_cores(session.world.local_size)
        job = Job.of_world(session.device, one_host=session.world.local_size == session.world.size)
        text = TextPart(seed=args.seed, layout=args.layout or "zigzag", seqlen=args.seqlen, steps=args.steps, plot=args.plot)
        copy = CopyPart(seed=args.seed, cut=args.cut)
        parts = {"text": (text,), "copy": (copy,), "both": (text, copy)}[args.part]
        passed = [part.run(job) for part in parts]  # all of them, also after one has failed
    return 0 if all(passed) else 1


def share_cores(local_size: int) -> None:
    """Leave each rank its part of the host's cores; mpiexec does not see to it."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
