# SPDX-License-Identifier: Apache-2.0
"""Hooks deep optimizer states into an imported Megatron, without changing a file.

`install` reaches in memory the three places that the patches reach on disk: the fields of OptimizerConfig, the class
that Megatron builds for the distributed optimizer, and, where megatron.training is used, its argument parser. For
frameworks that pip-install megatron-core, and for trees that must stay as they are.

The order of imports does not matter. Megatron looks its hooked functions up by name when it calls them, copies of
those names in other modules are replaced too, and megatron.training, which is slow to import and which many
frameworks do without, is hooked when somebody imports it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from megatron_dos.arguments import add_arguments, validate_args, validate_config, validate_optimizer
from megatron_dos.options.options import DosOptions
from megatron_dos.patching.on_disk import known_versions
from megatron_dos.supported import MEGATRON
from megatron_dos.wrapping import exchange, replaced, undo

__all__ = ["InstallError", "install", "is_patched", "uninstall"]

_ARGUMENTS = "megatron.training.arguments"
_OPTIMIZER = "megatron.core.optimizer"


class InstallError(ImportError):
    """There is no Megatron to hook into, or not one that is known; nothing was hooked."""


class _Hooks:
    """What `install` has done in this process, in the order in which it is undone: last first."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []
        self.finder: _ArgumentsFinder | None = None

    @property
    def installed(self) -> bool:
        return self.finder is not None


_hooks = _Hooks()


def install() -> None:
    """Make the imported Megatron accept and build deep optimizer states. Does nothing the second time, or in a
    patched tree.

    Raises:
        InstallError: megatron-core cannot be imported, or is of a version that this package does not know.
    """
    if _hooks.installed:
        return
    optimizer = _import_megatron()
    if is_patched(optimizer.OptimizerConfig):
        return
    _hooks.finder = _ArgumentsFinder()
    try:
        _extend_config(optimizer.OptimizerConfig)
        _replace_function(optimizer, "_get_megatron_optimizer_based_on_param_groups", _build_deep_states)
        _replace_function(optimizer, "_get_megatron_emerging_optimizer", _check_emerging)
        sys.meta_path.insert(0, _hooks.finder)
        if _ARGUMENTS in sys.modules:
            _hook_arguments(sys.modules[_ARGUMENTS])
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Undo `install`. Optimizers that were built stay as they are, and what they need of Megatron's classes stays until
    they are gone."""
    if _hooks.finder in sys.meta_path:
        sys.meta_path.remove(_hooks.finder)
    _hooks.finder = None
    while _hooks.undo:
        _hooks.undo.pop()()
    undo()


def is_patched(config_class: type) -> bool:
    """Whether `config_class` (an OptimizerConfig) has the fields of DosOptions, from a patch or from `install`."""
    return {field.name for field in dataclasses.fields(DosOptions)} <= {
        field.name for field in dataclasses.fields(config_class)
    }


def _import_megatron() -> ModuleType:
    """megatron.core.optimizer, after checks of its version and of the places to be hooked."""
    known = known_versions()
    try:
        package_info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise InstallError(
            f"megatron_dos.install() cannot import Megatron ({error}). Install it (pip install megatron-core), or put "
            f"a Megatron-LM checkout on PYTHONPATH. Known versions: {known}."
        ) from error
    version = getattr(package_info, "__version__", "of no version")
    if not MEGATRON.include(version):
        raise InstallError(
            f"megatron-core {version} is not known to megatron-dos; known versions: {known}. "
            "Install one of these, or a megatron-dos that knows yours."
        )
    optimizer = importlib.import_module(_OPTIMIZER)
    needed = (
        "OptimizerConfig",
        "DistributedOptimizer",
        "_get_megatron_optimizer_based_on_param_groups",
        "_get_megatron_emerging_optimizer",
    )
    missing = [name for name in needed if not hasattr(optimizer, name)]
    if missing:
        raise InstallError(
            f"{_OPTIMIZER} of megatron-core {version} lacks {', '.join(missing)}: it was changed locally, and "
            f"megatron-dos cannot be hooked in. Known versions: {known}."
        )
    return optimizer


# --- The optimizer ---------------------------------------------------------------------------------------------


def _build_deep_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that builds the optimizer, with the class of the distributed optimizer chosen by the config."""

    @functools.wraps(original)
    def build(config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        validate_optimizer(config, model_chunks)
        if not config.use_deep_optimizer_states:
            return original(config, model_chunks, *args, **kwargs)
        from megatron_dos.optimizer import DeepStatesOptimizer

        # The name is replaced for the duration of this call only: elsewhere it serves isinstance checks.
        with replaced(sys.modules[_OPTIMIZER], "DistributedOptimizer", DeepStatesOptimizer):
            return original(config, model_chunks, *args, **kwargs)

    return build


def _check_emerging(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that builds optimizers other than Adam and SGD, which are refused."""

    @functools.wraps(original)
    def build(config: Any, *args: Any, **kwargs: Any) -> Any:
        validate_config(config)
        return original(config, *args, **kwargs)

    return build


def _replace_function(module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(original)` in the place of a function, in `module` and wherever else it was imported to by name."""
    original = getattr(module, name)
    replacement = wrap(original)
    exchange(name, original, replacement)
    _hooks.undo.append(lambda: exchange(name, replacement, original))


# --- The config ------------------------------------------------------------------------------------------------


def _extend_config(config_class: type) -> None:
    """Give a dataclass, and the dataclasses derived from it, the fields of DosOptions.

    The classes stay the same objects, so whoever has imported them sees the fields.
    """
    classes = [config_class, *_derived_dataclasses(config_class)]
    for cls in classes:
        _hooks.undo.append(functools.partial(_restore, cls, dict(vars(cls)), dict(inspect.get_annotations(cls))))
    config_class.__annotations__ = inspect.get_annotations(config_class) | DosOptions.types()
    for option in dataclasses.fields(DosOptions):
        # By keyword only, or the positional arguments of derived classes would move.
        setattr(config_class, option.name, dataclasses.field(default=option.default, kw_only=True))
    for cls in classes:
        _make_dataclass_again(cls)


def _derived_dataclasses(base: type[Any]) -> Iterator[type[Any]]:
    """All dataclasses derived from `base`, a base always before what is derived from it."""
    for derived in base.__subclasses__():
        if "__dataclass_fields__" in vars(derived):
            yield derived
        yield from _derived_dataclasses(derived)


def _restore(cls: type, attributes: dict[str, Any], annotations: dict[str, Any]) -> None:
    """Set the attributes and annotations of `cls` to those of before, and delete the others."""
    for name in set(vars(cls)) - set(attributes):
        delattr(cls, name)
    for name, value in attributes.items():
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)
    if inspect.get_annotations(cls) != annotations:
        cls.__annotations__ = annotations


def _make_dataclass_again(cls: type) -> None:
    """Have dataclasses generate the methods of `cls` anew, for its fields of now. A method written by hand stays."""
    parameters = cls.__dataclass_params__  # type: ignore[attr-defined]
    if parameters.frozen or parameters.order or parameters.unsafe_hash or "__slots__" in vars(cls):
        raise InstallError(f"{cls.__module__}.{cls.__qualname__} is not a plain dataclass and cannot take new fields")
    for field in dataclasses.fields(cls):
        if field.name in inspect.get_annotations(cls) and field.name not in DosOptions.types():
            # dataclass() left only the plain default on the class; without its Field, the other settings are lost.
            setattr(cls, field.name, dataclasses.field(**_settings(field)))
    for name in ("__init__", "__repr__", "__eq__", "__match_args__"):
        # dataclass() does not overwrite what is there.
        if name in vars(cls) and (name == "__match_args__" or _is_generated(vars(cls)[name])):
            delattr(cls, name)
    dataclasses.dataclass(init=parameters.init, repr=parameters.repr, eq=parameters.eq)(cls)


def _settings(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The arguments of dataclasses.field() that make `field`."""
    names = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
    return {name: getattr(field, name) for name in names if getattr(field, name) is not dataclasses.MISSING}


def _is_generated(method: Callable[..., Any]) -> bool:
    """Whether dataclasses wrote this method. It compiles its own inside a function of this name (since Python 3.11
    the code says so; before, only that it was compiled from a string)."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return (
        code is not None
        and code.co_filename == "<string>"
        and getattr(code, "co_qualname", "__create_fn__").startswith("__create_fn__")
    )


# --- The argument parser of megatron.training ------------------------------------------------------------------


def _hook_arguments(module: ModuleType) -> None:
    """Hook megatron.training.arguments: the argument group, and the check before Megatron's own."""
    missing = [name for name in ("add_megatron_arguments", "validate_args") if not hasattr(module, name)]
    if missing:
        raise InstallError(
            f"{_ARGUMENTS} lacks {', '.join(missing)}, and megatron-dos cannot be hooked in. "
            f"Known versions of Megatron: {known_versions()}."
        )
    _replace_function(module, "add_megatron_arguments", _add_our_arguments)
    _replace_function(module, "validate_args", _check_our_arguments)


def _add_our_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(original(parser))

    return add_megatron_arguments


def _check_our_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked_validate_args(args: Any, *more: Any, **named: Any) -> Any:
        validate_args(args)
        return original(args, *more, **named)

    return checked_validate_args


class _ArgumentsFinder(importlib.abc.MetaPathFinder):
    """Finds megatron.training.arguments as the other finders do, and hooks it once it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _ARGUMENTS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _HookingLoader(spec.loader)
                return spec
        return None


class _HookingLoader(importlib.abc.Loader):
    """A loader that behaves as the one it wraps, and hooks the module behind it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and the like, which tracebacks and inspect use

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert module.__spec__ is not None, "it was found by one"
        module.__spec__.loader = module.__loader__ = self._loader
        _hook_arguments(module)
