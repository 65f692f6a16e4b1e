"""Benchmarks as commands: where there is no GPU, one sentence."""

import importlib

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["bench_tile", "check_tile", "sweep_tile", "bench_ring", "bench_peers", "bench_overlap"])
def test_without_a_gpu_a_sentence_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert "needs a GPU, and torch sees none" in capsys.readouterr().err
