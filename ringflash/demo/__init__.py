"""The demo: ring attention trains a small language model and one rank repeats it; read model, train, parts."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ringflash demo` with these arguments (default: the process's); returns the exit status."""
    from ringflash.demo.command import main as run_command  # here, so that `import ringflash.demo.model` stays light

    return run_command(argv)
