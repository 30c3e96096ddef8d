# SPDX-License-Identifier: Apache-2.0
"""Hooks into what belongs to others: once, marked, with the original kept, and undone when nobody needs them."""

from __future__ import annotations

import gc

import pytest

from megatron_dos import wrapping
from megatron_dos.wrapping import is_wrapped, needed_by, undo, wrap_method, wrap_once


class User:
    pass


@pytest.fixture(autouse=True)
def no_hooks(monkeypatch):
    monkeypatch.setattr(wrapping, "_undos", [])
    monkeypatch.setattr(wrapping, "_undo_is_wanted", False)
    gc.collect()
    monkeypatch.setattr(wrapping, "_users", 0)


@pytest.fixture
def classes():
    class Base:
        def inherited(self) -> str:
            return "inherited"

    class Theirs(Base):
        def save(self, name: str) -> str:
            """Saves."""
            return f"saved {name}"

    return Base, Theirs


def twice(original):
    def wrapper(self, *args):
        return f"{original(self, *args)}, and again"

    return wrapper


def test_a_method_is_wrapped_once_and_says_so(classes):
    _, theirs = classes
    original = theirs.save
    for _ in range(3):
        wrap_once(theirs, "save", twice)
    assert theirs().save("x") == "saved x, and again"
    assert is_wrapped(theirs.save)
    assert theirs.save.__wrapped__ is original
    assert (theirs.save.__name__, theirs.save.__doc__) == ("save", "Saves.")


def test_undo_restores_own_and_inherited_methods(classes):
    base, theirs = classes
    original = theirs.save
    wrap_once(theirs, "save", twice)
    wrap_once(theirs, "inherited", twice)
    assert base().inherited() == "inherited"
    undo()
    assert theirs.save is original
    assert "inherited" not in vars(theirs)
    wrap_once(theirs, "save", twice)
    assert theirs().save("x") == "saved x, and again"


def test_hooks_stay_as_long_as_somebody_needs_them(classes):
    _, theirs = classes
    wrap_once(theirs, "save", twice)
    first, second = User(), User()
    needed_by(first)
    needed_by(second)
    undo()
    del first
    gc.collect()
    assert is_wrapped(theirs.save)
    del second
    gc.collect()
    assert not is_wrapped(theirs.save)


def test_the_end_of_a_user_alone_undoes_nothing(classes):
    _, theirs = classes
    wrap_once(theirs, "save", twice)
    user = User()
    needed_by(user)
    del user
    gc.collect()
    assert is_wrapped(theirs.save)


def test_what_others_have_wrapped_since_stays(classes):
    _, theirs = classes
    wrap_once(theirs, "save", twice)
    ours = theirs.save
    theirs.save = lambda self, name: ours(self, name).upper()
    undo()
    assert theirs().save("x") == "SAVED X, AND AGAIN"


def test_a_method_of_an_object_is_wrapped_anew_and_not_twice(classes):
    _, theirs = classes
    one, other = theirs(), theirs()
    for number in (1, 2):
        wrap_method(one, "save", lambda save, number=number: lambda name: f"{number}: {save(name)}")
    assert one.save("x") == "2: saved x"
    assert other.save("x") == "saved x"


def test_a_missing_method_is_named(classes):
    _, theirs = classes
    with pytest.raises(AttributeError, match=r"test_wrapping\..*Theirs has no load: .*megatron-dos doctor"):
        wrap_once(theirs, "load", twice)
    with pytest.raises(AttributeError, match="Theirs has no load"):
        wrap_method(theirs(), "load", twice)
