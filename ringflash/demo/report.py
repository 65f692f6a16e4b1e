"""What the demo shows, on rank 0: a live progress line, tables, loss curves as a line of blocks or as a picture."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringflash.demo.compare import Difference
from ringflash.demo.train import Run

Show = Callable[[Run, str], None]
CURVE_WIDTH = 60
TABLE_ROWS = 6
LINES_WITHOUT_TERMINAL = 5


class Display:
    """The screen of a job: rank 0's, or one that stays dark (`shown` false)."""

    def __init__(self, *, shown: bool) -> None:
        self.console = Console(quiet=not shown, highlight=False)

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def verdict(self, passed: bool, text: str) -> None:
        """Print a line that says whether a check passed."""
        self.say(f"[bold green]PASS[/]  {text}" if passed else f"[bold red]FAIL[/]  {text}")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Show]:
        """A live line for `total` steps, fed by the function it gives; a few plain lines where there is no terminal."""
        if not self.console.is_terminal:
            yield self._plain_lines(title, total)
            return
        columns = (
            TextColumn(title),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, disable=self.console.quiet) as progress:
            task = progress.add_task(title, total=total, state="")
            yield lambda run, note: progress.update(task, completed=len(run.losses), state=_state(run, note))

    def _plain_lines(self, title: str, total: int) -> Show:
        every = max(1, total // LINES_WITHOUT_TERMINAL)

        def show(run: Run, note: str) -> None:
            if len(run.losses) % every == 0:
                self.say(f"{title}  {len(run.losses)}/{total}  {_state(run, note)}")

        return show

    def losses(self, ring: Run, alone: Run) -> None:
        """Both loss curves: a few steps side by side, and the whole as a line each."""
        table = Table("step", count_ranks(ring.ranks), count_ranks(alone.ranks), "relative difference", title="loss")
        for step in _spread(len(ring.losses), TABLE_ROWS):
            a, b = ring.losses[step], alone.losses[step]
            table.add_row(str(step + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(b):.1e}")
        self.console.print(table)
        marks = "▁▂▃▄▅▆▇█" if self.console.encoding.startswith("utf") else "_.-=+*#@"
        for run in (ring, alone):
            self.say(f"{count_ranks(run.ranks):>8}  {sparkline(run.losses, marks)}")

    def speeds(self, rows: Sequence[tuple[Run, Sequence[int]]], *, memory: str) -> None:
        """Tokens per second of each run, and the peak memory of each of its ranks in bytes."""
        table = Table("run", "tokens/s", f"{memory}, MiB")
        for run, peaks in rows:
            mebibytes = "  ".join(f"{peak / 2**20:,.0f}" for peak in peaks)
            table.add_row(count_ranks(run.ranks), _speed(run), mebibytes)
        self.console.print(table)

    def difference(self, found: Difference, bound: Difference) -> bool:
        """Print the largest differences beside their bounds; returns whether they are kept."""
        for name, steps in zip(("loss", "gradient"), found.steps, strict=True):
            value, limit = getattr(found, name), getattr(bound, name)
            words = f"largest relative difference of {name}, {steps} of {found.steps[0]} steps: {value:.1e} (bound {limit:.0e})"
            self.verdict(value <= limit, words)
        return found.within(bound)


def sparkline(values: Sequence[float], marks: str, width: int = CURVE_WIDTH) -> str:
    """Values as a line of at most `width` marks, the lowest value as the first mark."""
    picked = [values[i] for i in _spread(len(values), width)]
    low, high = min(picked), max(picked)
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join(marks[round((value - low) * scale)] for value in picked)


def plot(path: Path, ring: Run, alone: Run) -> None:
    """Write both loss curves as a picture. Raises ModuleNotFoundError without matplotlib (the extra `plot`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)", title="One sequence per step")
    # Broad below thin, so that both are seen where they are equal.
    axes.plot(alone.losses, linewidth=5, alpha=0.3, label=count_ranks(alone.ranks))
    axes.plot(ring.losses, linewidth=1, color="black", label=count_ranks(ring.ranks))
    axes.legend()
    figure.savefig(path, dpi=150)


def _state(run: Run, note: str) -> str:
    return f"loss {run.losses[-1]:.3f}  {_speed(run)} tokens/s  {note}".rstrip()


def _speed(run: Run) -> str:
    """Tokens per second, which the first step does not tell."""
    return f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else "-"


def count_ranks(count: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 ... count-1, evenly spread, the first and the last among them."""
    return sorted({round(i * (count - 1) / max(1, min(most, count) - 1)) for i in range(min(most, count))})
