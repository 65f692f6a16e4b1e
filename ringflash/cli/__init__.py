"""The `ringflash` command: one subcommand per module."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from ringflash.cli import verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ringflash demo ...` or `ringflash verify ...`; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="ringflash", description="Exact attention over sequences that span several GPUs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,verify}")
    commands.add_parser(
        "demo", help="train a small language model over several ranks and over one, and compare", add_help=False
    )
    commands.add_parser("verify", help="compare the ring's results with a float64 oracle", add_help=False)
    chosen, rest = parser.parse_known_args(argv[:1])[0], argv[1:]
    if chosen.command == "verify":
        return verify.main(rest)
    from ringflash import demo

    return demo.main(rest)


def version() -> str:
    """The installed version, or words for a tree that is used uninstalled."""
    try:
        return importlib.metadata.version("ringflash")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
