# SPDX-License-Identifier: Apache-2.0
"""One way to hook into the classes, functions and objects of others, and to undo it.

Whatever is put in the place of a function is marked as this package's and has the original as `__wrapped__`. Methods of
classes stay wrapped as long as an optimizer lives that needs it, see `needed_by` and `undo`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["exchange", "is_wrapped", "needed_by", "replaced", "undo", "wrap_method", "wrap_once"]

MARK = "_wrapped_by_megatron_dos"
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_undos: list[Callable[[], None]] = []
_users = 0
_undo_is_wanted = False


def wrap_once(target: type, name: str, wrap: Wrap) -> None:
    """Put `wrap(original)` in the place of a method of a class. Does nothing the second time.

    Raises:
        AttributeError: the class has no such method: it is of another version than this package knows.
    """
    original = _found(target, name)
    if is_wrapped(original):
        return
    replacement, is_own = _marked(wrap(original), original), name in vars(target)

    def restore() -> None:
        if vars(target).get(name) is not replacement:  # somebody else has wrapped it since
            return
        if is_own:
            setattr(target, name, original)
        else:
            delattr(target, name)

    setattr(target, name, replacement)
    _undos.append(restore)


def wrap_method(target: Any, name: str, wrap: Wrap) -> None:
    """Put `wrap(original)` in the place of a method of one object, and of what this package had put there before.

    Raises:
        AttributeError: the object has no such method.
    """
    original = _found(target, name)
    if is_wrapped(original):
        original = original.__wrapped__
    setattr(target, name, _marked(wrap(original), original))


def is_wrapped(function: Any) -> bool:
    """Whether this package has wrapped it, or something that others have wrapped since."""
    return getattr(function, MARK, False)


def needed_by(user: Any) -> None:
    """As long as `user` lives, wrapped methods of classes stay wrapped."""
    global _users
    _users += 1
    weakref.finalize(user, _not_needed).atexit = False


def _not_needed() -> None:
    global _users
    _users -= 1
    _undo_if_wanted()


def undo() -> None:
    """Restore the wrapped methods of classes, now or once nobody needs them any more."""
    global _undo_is_wanted
    _undo_is_wanted = True
    _undo_if_wanted()


def _undo_if_wanted() -> None:
    global _undo_is_wanted
    if not _undo_is_wanted or _users:
        return
    _undo_is_wanted = False
    while _undos:
        _undos.pop()()


def _found(target: Any, name: str) -> Any:
    try:
        return getattr(target, name)
    except AttributeError:
        of = target if isinstance(target, type) else type(target)
        raise AttributeError(
            f"{of.__module__}.{of.__qualname__} has no {name}: it was changed, or is of a version that megatron-dos "
            "does not know (run: megatron-dos doctor)"
        ) from None


def _marked(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(replacement, original)
    setattr(replacement, MARK, True)
    return replacement


@contextlib.contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Within the block, a name of a module is another value's."""
    previous = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, previous)


def exchange(name: str, old: Any, new: Any) -> None:
    """Put `new` in the place of `old` in every module that has it by that name."""
    for module in list(sys.modules.values()):
        # Not getattr, which would make lazy modules import things.
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
