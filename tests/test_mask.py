"""Masks: intervals and work against the definition, hashing, tensors, and the words of every refusal."""

import pickle
import re

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_plan import masks

import ringflash as rf


@given(st.data(), st.integers(0, 40))
def test_pieces_are_the_definition(data: st.DataObject, seqlen: int) -> None:
    mask = data.draw(masks(seqlen))
    position = torch.arange(seqlen)
    sees = oracle.visible(mask, position, position)
    rows = mask.pieces(seqlen)
    assert len(rows) == (mask.batch or 1)
    for pieces, expected in zip(rows, sees, strict=True):
        assert pieces.first.tolist() == [0, *pieces.last.tolist()][: len(pieces.first)]
        assert [seqlen, *pieces.last.tolist()][-1] == seqlen
        at = np.repeat(np.arange(len(pieces.first)), pieces.last - pieces.first)
        each = pieces.take(at)
        begin, end = (torch.from_numpy(x + slope * np.arange(seqlen)) for x, slope in (each[2:4], each[4:6]))
        assert torch.equal((position >= begin[:, None]) & (position < end[:, None]), expected)
        assert bool(((begin.diff() >= 0) & (end.diff() >= 0)).all())
    assert mask.row_work(seqlen).tolist() == sees.sum((0, 2)).tolist()


@given(st.data(), st.integers(1, 40))
def test_pieces_are_few(data: st.DataObject, seqlen: int) -> None:
    mask = data.draw(masks(seqlen))
    for pieces, bounds in zip(mask.pieces(seqlen), mask.document_rows(seqlen), strict=True):
        assert len(pieces.first) <= 4 * (len(bounds) - 1)


@pytest.mark.parametrize(
    "documents", [torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9], dtype=torch.int32), np.array([0, 4, 9]), [0, 4, 9]], ids=repr
)
def test_documents_in_any_form_are_the_same_mask(documents: object) -> None:
    mask = rf.Mask(causal=True, documents=documents)  # pyright: ignore[reportArgumentType]
    assert mask.documents == (0, 4, 9)
    assert mask == rf.Mask(causal=True, documents=(0, 4, 9))


@pytest.mark.parametrize(
    "documents",
    [
        torch.tensor([[0, 4, 9], [0, 0, 9]]),
        [torch.tensor([0, 4, 9]), torch.tensor([0, 0, 9])],
        [np.array([0, 4, 9]), np.array([0, 0, 9])],
        [[0, 4, 9], (0, 0, 9)],
    ],
    ids=["tensor", "tensors", "arrays", "lists"],
)
def test_documents_of_each_batch_row(documents: object) -> None:
    mask = rf.Mask(documents=documents)  # pyright: ignore[reportArgumentType]
    assert mask.documents == ((0, 4, 9), (0, 0, 9))
    assert mask.batch == 2
    assert len(mask.pieces(9)) == 2


def test_masks_hash_and_compare_by_value() -> None:
    masks = {rf.Mask(causal=True, window=(3, None)), rf.Mask(True, (3, None)), rf.Mask(causal=True, window=[3, None])}  # pyright: ignore[reportArgumentType]
    assert len(masks) == 1
    assert rf.Mask(window=(None, None)) == rf.Mask() != rf.Mask(causal=True)
    assert len({rf.Mask(documents=(0, 3)), rf.Mask(documents=((0, 3),)), rf.Mask(documents=(0, 3, 3))}) == 3


def test_masks_are_frozen() -> None:
    with pytest.raises(AttributeError):
        rf.Mask().causal = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (
            ValueError,
            {"causal": True, "window": (None, 2)},
            "causal and a right window contradict: causal=True, window=(None, 2)",
        ),
        (ValueError, {"window": (-1, None)}, "window must not be negative: window=(-1, None); None is unbounded"),
        (ValueError, {"window": (3, -2)}, "window must not be negative: window=(3, -2)"),
        (TypeError, {"window": 3}, "window must be (left, right), each a number of keys or None: window=3"),
        (TypeError, {"window": (1, 2, 3)}, "window must be (left, right)"),
        (TypeError, {"window": (1.5, None)}, "window must be (left, right)"),
        (TypeError, {"window": (True, None)}, "window must be (left, right)"),
        (TypeError, {"causal": 1}, "causal must be True or False: causal=1"),
        (TypeError, {"causal": None}, "causal must be True or False: causal=None"),
        (ValueError, {"prefix": -1}, "prefix must not be negative: prefix=-1"),
        (TypeError, {"prefix": 1.0}, "prefix must be a number of keys: prefix=1.0"),
        (ValueError, {"prefix": 2, "documents": (0, 4)}, "prefix and documents contradict"),
        (ValueError, {"prefix": 2, "window": (3, 0)}, "prefix and a left window contradict: window=(3, 0); use (None, right)"),
        (ValueError, {"documents": (1, 4)}, "documents must start at 0: documents[0]=1; pass cumulative lengths"),
        (ValueError, {"documents": (0, 4, 3)}, "documents must be ascending: entry 1 is 4, entry 2 is 3"),
        (ValueError, {"documents": ((0, 4), (0, 5, 4))}, "documents[1] must be ascending: entry 1 is 5, entry 2 is 4"),
        (TypeError, {"documents": (0, 4.0)}, "documents must hold ints"),
        (TypeError, {"documents": torch.tensor([0.0, 4.0])}, "documents must hold ints"),
        (TypeError, {"documents": ()}, "documents must be cumulative lengths (0, ..., seqlen)"),
        (TypeError, {"documents": ((),)}, "documents[0] must be cumulative lengths"),
        (TypeError, {"documents": 4}, "documents must be cumulative lengths"),
        (TypeError, {"documents": torch.tensor(4)}, "documents must be cumulative lengths"),
        (TypeError, {"documents": ((0, 4), 4)}, "documents[1] must be cumulative lengths"),
    ],
    ids=str,
)
def test_refusals_are_worded(kind: type[Exception], arguments: dict, words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        rf.Mask(**arguments)


@pytest.mark.parametrize("documents", [(0, 4), ((0, 8), (0, 4))], ids=str)
def test_documents_must_end_at_the_sequence_length(documents: tuple) -> None:
    with pytest.raises(ValueError, match="documents must end at the sequence length: the last entry is 4, seqlen=8; count pad"):
        rf.Mask(documents=documents).check_seqlen(8)
    rf.Mask(documents=(0, 4)).check_seqlen(4)
    rf.Mask().check_seqlen(8)


def test_a_pickled_mask_is_hashed_anew() -> None:
    """Hashes differ from process to process; plans are found by them."""
    mask = rf.Mask(causal=True, window=(3, None), documents=(0, 4, 9))
    object.__setattr__(mask, "_hash", 1)  # as another process had it
    twin = pickle.loads(pickle.dumps(mask))
    assert twin == mask
    assert hash(twin) == hash(rf.Mask(causal=True, window=(3, None), documents=(0, 4, 9)))
