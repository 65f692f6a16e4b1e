"""How ranks agree that they were called alike, so that a mistake of one is an error on all before anything moves.

Checks agree on when they run: a collective check depends only on the call's number in its group, so that no rank can
enter it alone. A rank with a local error sends the error in place of its facts, and every rank raises.
"""

import json
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

T = TypeVar("T")
FIRST_CALLS = 16  # check="first": enough for every kind of layer of a model to be compared once


class _Gathers(Protocol):
    rank: int
    size: int
    calls: int
    check: str
    left: str | None
    message_bytes: int

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message of at most message_bytes, in rank order."""
        ...

    def left_together(self) -> bool:
        """Whether all ranks left the call that this one left."""
        ...

    def leave_word(self, error: BaseException) -> None:
        """Leave for the other ranks why this one will not join their exchange; sets `left`."""
        ...

    def alive(self) -> bool:
        """Whether the ring's process groups still exist."""
        ...


def together(comm: _Gathers, prepare: Callable[[], T], *, facts: Callable[[T], dict[str, object]], check: str | None) -> T:
    """Run this rank's own checks (`prepare`), then compare the ranks: whatever is wrong on one is raised on all.

    check: the mode of `Options`; None (options so wrong that they have none) is the group's.
    """
    mode = (comm.check if comm.calls else "first") if check is None else check
    try:
        prepared = prepare()
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        agree(comm, error, mode)
        raise
    agree(comm, lambda: facts(prepared), mode)
    return prepared


def agree(comm: _Gathers, mine: Callable[[], dict[str, object]] | Exception, check: str) -> None:
    """Raise `mine` if it is an error; in a checked call raise on every rank if any rank has one or its facts differ.

    Counts the call. The mode is the group's, agreed in its first call, which is always compared: "first" checks the first
    FIRST_CALLS calls of the group, "always" every one, "never" no other.
    """
    _require_alive(comm)
    comm.calls += 1
    if comm.left is not None:
        _return(comm)
    if comm.calls == 1:
        comm.check = check
    elif check != comm.check and not isinstance(mine, Exception):
        mine = ValueError(
            f"check must stay what the group's first call said: check={check!r}, first call {comm.check!r}; "
            "pass the same Options, or another group"
        )
    if is_checked(comm):
        _exchange_facts(comm, mine)
    elif isinstance(mine, Exception):
        comm.leave_word(mine)  # the others are not told now: they find it when their exchange fails
    if isinstance(mine, Exception):
        raise mine


def _require_alive(comm: _Gathers) -> None:
    if not comm.alive():
        raise RuntimeError("this ring's process group was destroyed: make a new ContextParallel, or pass the new group")


def _return(comm: _Gathers) -> None:
    """Let a rank that left a call take part again if all left it; nothing is sent until that is known."""
    if not comm.left_together():
        error = RuntimeError(f"this ring is out of step since {comm.left}; make a new group and a ring over it, on all ranks")
        comm.leave_word(error)
        raise error
    comm.left = None


def is_checked(comm: _Gathers) -> bool:
    """Whether the ranks compare the call that was counted last."""
    if comm.size == 1:
        return False
    return comm.calls == 1 or comm.check == "always" or (comm.check == "first" and comm.calls <= FIRST_CALLS)


def same_backward(comm: _Gathers, number: int) -> None:
    """Raise on every rank unless all are about to run the backward pass of the same call. A collective."""
    _require_alive(comm)
    exchange(comm, lambda: {"call": f"the backward pass of call {number}"})


def exchange(comm: _Gathers, mine: Callable[[], Mapping[str, object]] | Exception) -> None:
    """Send this rank's facts or error and raise if any rank has an error (not this one's own) or facts differ. A collective."""
    sent: Mapping[str, object] = {"error": f"{type(mine).__name__}: {mine}"} if isinstance(mine, Exception) else mine()
    answers = [_unpacked(x) for x in comm.gather_bytes(_packed(sent, comm.message_bytes))]
    if not isinstance(mine, Exception):
        _compare(answers)


def _exchange_facts(comm: _Gathers, mine: Callable[[], dict[str, object]] | Exception) -> None:
    try:
        exchange(comm, mine if isinstance(mine, Exception) else lambda: mine() | {"check": comm.check})
    except (RuntimeError, ValueError):
        _forget_first_call(comm)
        raise
    if isinstance(mine, Exception):
        _forget_first_call(comm)


def _forget_first_call(comm: _Gathers) -> None:
    """A first call that failed agreed nothing: the next is the first again, on every rank."""
    if comm.calls == 1:
        comm.calls = 0


def _unpacked(answer: bytes) -> dict[str, object]:
    try:
        facts = json.loads(answer)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise RuntimeError(
            "the ranks of the ring are not in step: one of them is in another collective of the ring than this one"
        )
    return facts


def _packed(sent: Mapping[str, object], limit: int) -> bytes:
    """The facts as JSON of at most `limit` bytes: texts are cut where they are too long."""
    width, message = limit, b""
    while not message or len(message) > limit:
        message = json.dumps({name: _cut(x, width) for name, x in sent.items()}, default=repr).encode()
        width //= 2
    return message


def _cut(x: object, width: int) -> object:
    if isinstance(x, tuple):
        return [_cut(part, width) for part in x]
    return x[:width] if isinstance(x, str) else x


def _key(fact: object) -> object:
    """What of a fact is compared: all of it, or of (words, key) the key."""
    return fact[1] if isinstance(fact, list) else fact


def _words(fact: object) -> object:
    return fact[0] if isinstance(fact, list) else fact


def _compare(answers: list[dict[str, object]]) -> None:
    for other, answer in enumerate(answers):
        if "error" in answer:
            raise RuntimeError(f"rank {other} of the ring was called wrongly, so no rank runs: {answer['error']}")
    for name, value in answers[0].items():
        for other, answer in enumerate(answers):
            if name == "equal shards" and None in (answer[name], value):
                continue  # one of the two was given a layout of its own
            if _key(answer[name]) != _key(value):
                raise ValueError(_differs(name, answers, other))


def _differs(name: str, answers: list[dict[str, object]], other: int) -> str:
    found = f"rank 0 has {_words(answers[0][name])}, rank {other} has {_words(answers[other][name])}"
    if name == "call":
        return f"every rank of the ring must make the same calls in the same order: {found}"
    if name == "equal shards":
        return (
            f"layout by name needs the same number of tokens on every rank: {found}; pass rf.layouts.zigzag(seqlen, size) "
            "or the like, which fit any seqlen"
        )
    if name == "gradients needed":
        return (
            f"gradients must be needed on every rank of the ring or on none: {found}; a rank without tokens or labels "
            "still takes part in backward: give it inputs that require gradients"
        )
    return f"{name} must be the same on every rank of the ring: {found}"
