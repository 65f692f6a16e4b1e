"""What the demo prints: sparklines of any length, a dark display, and the picture."""

from pathlib import Path

import pytest
import torch

from ringflash.demo.report import Display, plot, sparkline
from ringflash.demo.train import Run

MARKS = "01234567"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0], "0"), ([2.0, 2.0], "00"), ([0.0, 7.0, 3.0], "073"), ([float(i) for i in range(8)], MARKS)],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values, MARKS) == expected


def test_a_long_sparkline_keeps_its_ends() -> None:
    line = sparkline([float(-i) for i in range(1000)], MARKS, width=20)
    assert len(line) == 20
    assert (line[0], line[-1]) == ("7", "0")


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ranks=2, losses=[1.0, 0.5], gradients={0: torch.ones(1)})
    display = Display(shown=False)
    display.losses(run, run)
    display.verdict(False, "unseen")
    with display.progress("unseen", 2) as show:
        show(run, "")
    assert capsys.readouterr().out == ""


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Run(ranks=2, losses=[1.0, 0.5])
    plot(tmp_path / "losses.png", run, run)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_steps_count_from_one_and_unknown_speed_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ranks=2, losses=[1.0, 0.5, 0.25])
    display = Display(shown=True)
    with display.progress("2 ranks", 3) as show:
        show(run, "")
    display.losses(run, run)
    out = capsys.readouterr().out
    assert "2 ranks  3/3  loss 0.250  - tokens/s\n" in out
    assert [line.split()[1] for line in out.splitlines() if "0.0e+00" in line] == ["1", "2", "3"]
