"""Which transport a call gets: the first that can serve it, why others cannot, and what is refused in words."""

import re

import pytest
import torch

import ringflash as rf
from ringflash.auto import IN_ORDER, NEEDS, PREFERRED, Facts, Route, route
from ringflash.options import CHOICES

FACTS = Facts(size=4, hosts=(0, 0, 0, 0), device="cuda", buffer_bytes=1000)
MESH = FACTS._replace(heads=2)


def test_every_transport_has_its_needs() -> None:
    assert {"auto", *NEEDS} == set(CHOICES["transport"])
    assert {*PREFERRED, *IN_ORDER} <= set(NEEDS)


def test_one_rank_moves_nothing() -> None:
    for transport in CHOICES["transport"]:
        found = route(rf.Options(transport=transport), FACTS._replace(size=1, device="cpu"))
        assert found == Route("none", "auto", "one rank", 1)
    assert route(rf.Options(schedule="rotate"), FACTS._replace(size=1)).schedule == "rotate"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"transport": "p2p", "reproducible": True}, "transport='p2p' attends keys as ranks hold them"),
        ({"transport": "p2p", "schedule": "gather"}, "transport='p2p' keeps two blocks and does not gather"),
        ({"schedule": "direct", "reproducible": True}, "reproducible=True takes transport 'allgather', which gathers all keys"),
        ({"transport": "ulysses", "schedule": "direct"}, "transport='ulysses' passes no blocks from rank to rank"),
    ],
)
def test_options_that_contradict_each_other_are_refused_on_one_rank_too(how: dict, words: str) -> None:
    for size in (1, 4):
        with pytest.raises(NotImplementedError, match=re.escape(words)):
            route(rf.Options(**how), FACTS._replace(size=size))


@pytest.mark.parametrize(
    ("facts", "options", "transport", "why"),
    [
        (FACTS, rf.Options(), "nvlink", "one launch, keys pulled by copy engines"),
        (
            FACTS._replace(unlinked="rank 1: no peer access"),
            rf.Options(),
            "p2p",
            "keeps two blocks in flight; nvlink found no memory that all ranks' GPUs share (rank 1: no peer access)",
        ),
        (FACTS, rf.Options(transport="nvlink"), "nvlink", "asked for"),
        (FACTS._replace(device="cpu"), rf.Options(), "p2p", "keeps two blocks in flight; nvlink needs GPUs: the tensors"),
        (
            FACTS._replace(hosts=(0, 0, 1, 1)),
            rf.Options(),
            "p2p",
            "keeps two blocks in flight; nvlink needs GPUs of one host: the",
        ),
        (FACTS, rf.Options(max_buffer_bytes=999), "p2p", "keeps two blocks in flight; nvlink would keep 1000 bytes"),
        (FACTS, rf.Options(schedule="rotate"), "p2p", "keeps two blocks in flight; nvlink gathers all keys: schedule must"),
        (MESH, rf.Options(), "p2p", "keeps two blocks in flight; nvlink needs one ring of all ranks: the mesh is 2 x 2"),
        (FACTS, rf.Options(transport="allgather"), "allgather", "asked for"),
        (FACTS._replace(heads=4), rf.Options(transport="ulysses"), "ulysses", "asked for"),
        (FACTS, rf.Options(reproducible=True), "allgather", "brings all keys, which reproducible=True attends in order of"),
        (FACTS, rf.Options(reproducible=True, transport="allgather"), "allgather", "asked for"),
    ],
)
def test_the_first_that_can(facts: Facts, options: rf.Options, transport: str, why: str) -> None:
    found = route(options, facts)
    assert (found.transport, found.heads) == (transport, facts.heads)
    assert found.why.startswith(why)
    assert found.schedule == ("gather" if transport in ("nvlink", "allgather") else options.schedule)


@pytest.mark.parametrize(
    ("facts", "how", "words"),
    [
        (FACTS._replace(device="cpu"), {"transport": "nvlink"}, "transport='nvlink' needs GPUs: the tensors are on a cpu; use"),
        (
            FACTS._replace(unlinked="rank 0: ?"),
            {"transport": "nvlink"},
            "transport='nvlink' found no memory that all ranks' GPUs share (rank 0: ?); use transport='p2p'",
        ),
        (FACTS, {"transport": "allgather", "max_buffer_bytes": 9}, "transport='allgather' would keep 1000 bytes of buffers"),
        (FACTS, {"transport": "p2p", "schedule": "gather"}, "transport='p2p' keeps two blocks and does not gather"),
        (
            MESH,
            {"transport": "nvlink"},
            "transport='nvlink' needs one ring of all ranks: the mesh is 2 x 2; use a group of one dimension",
        ),
        (MESH, {"transport": "allgather"}, "transport='allgather' needs one ring of all ranks: the mesh is 2 x 2; use"),
        (
            MESH,
            {"schedule": "gather"},
            "transport 'nvlink' needs one ring of all ranks: the mesh is 2 x 2; transport 'p2p' keeps",
        ),
        (
            MESH,
            {"reproducible": True},
            "reproducible=True takes transport 'allgather', which needs one ring of all ranks: the mesh is 2 x 2; use a group",
        ),
        *(
            (FACTS, {"reproducible": True, "transport": name}, f"transport='{name}' attends keys as ranks hold them, repro")
            for name in ("nvlink", "p2p", "ulysses")
        ),
        (FACTS, {"transport": "ulysses", "schedule": "direct"}, "passes no blocks from rank to rank, so that schedule must be"),
    ],
)
def test_refusals(facts: Facts, how: dict, words: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        route(rf.Options(**how), facts)


def test_facts_count_what_a_rank_keeps() -> None:
    k, v = torch.empty(2, 3, 2, 16), torch.empty(2, 3, 2, 8)
    facts = Facts.of(k, v, (3, 5), hosts=(0, 0))
    block = -(-2 * 5 * 2 * (16 + 8) * 4 // 256) * 256
    assert facts == Facts(2, (0, 0), "cpu", 2 * block + block + 2 * block, 1)
