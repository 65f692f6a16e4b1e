"""Options: frozen, compared by value, and nothing unknown is accepted."""

import dataclasses
import re

import numpy as np
import pytest
import torch

import ringflash as rf
from ringflash import tile
from ringflash.options import CHOICES
from ringflash.schedules import SCHEDULES


def test_defaults() -> None:
    assert rf.Options() == rf.Options(transport="auto", schedule="auto", check="first", deterministic=False, kernel="auto")
    assert hash(rf.Options()) == hash(rf.Options())


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        rf.Options().check = "never"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, choices in CHOICES.items() for value in choices])
def test_every_choice_is_taken(name: str, value: str) -> None:
    assert getattr(rf.Options(**{name: value}), name) == value  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["fast", None, 1, ["auto"], np.array(["auto"]), True], ids=repr)
def test_any_other_is_refused_in_words(name: str, value: object) -> None:
    words = f"{name} must be one of {', '.join(map(repr, CHOICES[name]))}: {name}={value!r}"
    with pytest.raises(ValueError, match=re.escape(words)):
        rf.Options(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["deterministic", "reproducible"])
def test_some_are_bools(name: str) -> None:
    assert getattr(rf.Options(**{name: True}), name)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=f"{name} must be True or False: {name}=1"):
        rf.Options(**{name: 1})  # pyright: ignore[reportArgumentType]


def test_reproducible_asks_a_tile_for_the_same_bits_too() -> None:
    assert rf.Options().of_tile == {"deterministic": False, "fixed": False}
    assert rf.Options(deterministic=True).of_tile == {"deterministic": True, "fixed": False}
    assert rf.Options(reproducible=True).of_tile == {"deterministic": True, "fixed": True}


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="overlap"):
        rf.Options(overlap=True)  # pyright: ignore[reportCallIssue]


def test_the_names_are_those_that_the_modules_know() -> None:
    assert set(CHOICES["schedule"]) == {"auto", *SCHEDULES}
    q = torch.empty(1, 1, 1, 64)
    assert {tile.pick(kernel, q, q).name for kernel in ("auto", "reference")} == {"reference"}
    for kernel in set(CHOICES["kernel"]) - {"auto", "reference"}:
        with pytest.raises(NotImplementedError, match=f"kernel={kernel!r} needs"):
            tile.pick(kernel, q, q)
