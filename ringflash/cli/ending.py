"""How a command ends where a person has to act: one line instead of a traceback, and an exit status that says which."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from rich.console import Console

from ringflash.launch import mpi
from ringflash.launch.bootstrap import Session, bootstrap

REFUSED, INTERRUPTED = 2, 130  # 128 + SIGINT, as shells have it


class Refused(Exception):
    """The command cannot run as it was started: the message is all that a person needs."""


@contextmanager
def launched(device: str | None) -> Iterator[Session]:
    """bootstrap(), whose own refusals (contradictory variables, no mpi4py, too few GPUs) become Refused."""
    with ExitStack() as stack:
        try:
            session = stack.enter_context(bootstrap(device=device))
        except dist.DistError:  # the ranks did not find each other: the traceback says where
            raise
        except (ValueError, RuntimeError) as error:
            raise Refused(str(error)) from error
        yield session


def ending(prog: str, command: Callable[[], int]) -> int:
    """Call `command`; its exit status, or REFUSED or INTERRUPTED after one line on stderr."""
    try:
        return command()
    except Refused as refusal:
        line, status = str(refusal), REFUSED
    except KeyboardInterrupt:
        line, status = "interrupted", INTERRUPTED
        Console().show_cursor()  # a progress line hides it, and was ended with its rank
        if sys.stderr.isatty():
            print(file=sys.stderr)  # leaves the progress line, and the terminal's ^C
    print(f"{prog}: {line}", file=sys.stderr)
    mpi.end_job(status)
    return status
