"""When and how ranks compare their calls, with the other rank played by the test (test_checks.py has real rings)."""

import json

import pytest

from ringflash import agreement


class Gathers:
    """A ring of two as `agree` sees it: the other rank sends what it is told to."""

    def __init__(self, other: dict[str, object]) -> None:
        self.rank, self.size, self.calls, self.check, self.other = 0, 2, 0, "first", other
        self.gathered: list[int] = []
        self.left: str | None = None
        self.message_bytes = 4096
        self.lives = self.all_left = True

    def alive(self) -> bool:
        return self.lives

    def leave_word(self, error: BaseException) -> None:
        self.left = self.left or str(error)

    def left_together(self) -> bool:
        return self.all_left

    def gather_bytes(self, message: bytes) -> list[bytes]:
        assert len(message) <= self.message_bytes
        self.gathered.append(self.calls)
        return [message, json.dumps(self.other).encode()]


@pytest.mark.parametrize(
    ("check", "checked"),
    [("first", list(range(1, agreement.FIRST_CALLS + 1))), ("always", list(range(1, 41))), ("never", [1])],
)
def test_when_checks_run_depends_on_the_call_number_alone(check: str, checked: list[int]) -> None:
    """Also "never" compares at the first call: ranks that chose differently would hang in the next."""
    comm = Gathers({"a": 1, "check": check})
    for _ in range(40):
        agreement.agree(comm, lambda: {"a": 1}, check)
    assert comm.gathered == checked
    assert comm.calls == 40


def test_the_mode_is_the_groups() -> None:
    """What the first call agreed stays: a rank that would check alone would wait for the others."""
    comm = Gathers({"a": 1, "check": "first"})
    agreement.agree(comm, lambda: {"a": 1}, "first")
    with pytest.raises(
        ValueError, match="check must stay what the group's first call said: check='always', first call 'first'"
    ):
        agreement.agree(comm, lambda: {"a": 1}, "always")


def test_a_first_call_that_failed_agreed_nothing() -> None:
    comm = Gathers({"a": 2, "check": "first"})
    with pytest.raises(ValueError, match="a must be the same on every rank"):
        agreement.agree(comm, lambda: {"a": 1}, "first")
    comm.other = {"a": 1, "check": "always"}
    agreement.agree(comm, lambda: {"a": 1}, "always")
    assert comm.calls == 1


def test_long_facts_fit_the_message() -> None:
    facts: dict[str, object] = {f"fact {i}": "ж" * 5000 for i in range(14)}
    comm = Gathers({})
    with pytest.raises(KeyError):
        agreement.agree(comm, lambda: facts, "first")


def left_in_call_two() -> Gathers:
    comm = Gathers({"a": 1, "check": "never"})
    agreement.agree(comm, lambda: {"a": 1}, "never")
    with pytest.raises(TypeError, match="x must be y"):
        agreement.agree(comm, TypeError("x must be y"), "never")
    return comm


def test_ranks_that_all_made_a_mistake_go_on_together() -> None:
    comm = left_in_call_two()
    agreement.agree(comm, lambda: {"a": 1}, "never")
    assert comm.gathered == [1]  # checks still run by the call's number alone


def test_a_rank_that_left_alone_is_out_of_step_and_sends_nothing() -> None:
    """The others may still wait in the call that it left: its next one must not be taken for that."""
    comm = left_in_call_two()
    comm.all_left = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this ring is out of step since x must be y"):
            agreement.agree(comm, lambda: {"a": 1}, "never")
    assert comm.gathered == [1]


@pytest.mark.parametrize("answer", [b"17", b"\xff\x00", b'"x"', b""])
def test_an_answer_of_another_collective_is_told(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Gathers({})
    monkeypatch.setattr(comm, "gather_bytes", lambda message: [message, answer])
    with pytest.raises(RuntimeError, match="the ranks of the ring are not in step"):
        agreement.agree(comm, lambda: {"a": 1}, "first")


def test_a_destroyed_group_is_named() -> None:
    comm = Gathers({"a": 1})
    comm.lives = False
    with pytest.raises(RuntimeError, match="this ring's process group was destroyed"):
        agreement.agree(comm, lambda: {"a": 1}, "first")
    with pytest.raises(RuntimeError, match="this ring's process group was destroyed"):
        agreement.same_backward(comm, 1)
    assert comm.gathered == []


def test_facts_with_words_are_compared_by_key() -> None:
    """Equal layouts may have different names."""
    comm = Gathers({"layout": ["contiguous", "abc"], "check": "always"})
    agreement.agree(comm, lambda: {"layout": ("per_document", "abc")}, "always")
    comm.other = {"layout": ["zigzag", "def"], "check": "always"}
    with pytest.raises(ValueError, match="rank 0 has per_document, rank 1 has zigzag"):
        agreement.agree(comm, lambda: {"layout": ("per_document", "abc")}, "always")


def test_facts_of_any_type_travel() -> None:
    agreement.agree(Gathers({"a": "{1}", "check": "first"}), lambda: {"a": {1}}, "first")
