# SPDX-License-Identifier: Apache-2.0
"""The hooks without a patch: in the installed Megatron, and each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import megatron_trees
import pytest
from megatron_trees import TARGETS

from megatron_dos.options.options import DosOptions
from megatron_dos.patching import on_disk as patching

PREAMBLE = """
import argparse, dataclasses, inspect, json, os, sys, types
from types import SimpleNamespace

def answer(**values):
    print()
    print(json.dumps(values))

# Stands in for the optimizer, which needs process groups and a device: the choice of the class is tested here.
class Chosen:
    def __init__(self, *args, **kwargs):
        self.chosen_with = kwargs

def stand_in(name):
    module = types.ModuleType(name)
    module.DeepStatesOptimizer = type("DeepStatesOptimizer", (Chosen,), {})
    return module

def build(config):
    '''Megatron's own function builds the optimizer of an empty model: no parameters, no groups, no device.'''
    import megatron.core.optimizer as optimizer
    from megatron.core.distributed import DistributedDataParallelConfig
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=config.use_distributed_optimizer)
    stock = optimizer.DistributedOptimizer
    optimizer.DistributedOptimizer = type("DistributedOptimizer", (Chosen,), {})
    try:
        return type(optimizer._get_megatron_optimizer_based_on_param_groups(
            config=config, model_chunks=[SimpleNamespace(ddp_config=ddp_config, config=None)], param_groups=[],
            per_model_buffers={}, pg_collection=SimpleNamespace(tp=None),
        )).__name__
    finally:
        optimizer.DistributedOptimizer = stock

def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
"""

CORE = """
sys.modules["megatron_dos.optimizer"] = stand_in("megatron_dos.optimizer")
from megatron.core.optimizer import OptimizerConfig
import megatron.core.optimizer as optimizer

@dataclasses.dataclass
class Derived(OptimizerConfig):
    own: list = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=3, repr=False, metadata={"a": 1})

@dataclasses.dataclass
class DerivedTwice(Derived):
    more: float = 1.0
    def __repr__(self):
        return "by hand"

class NoDataclass(OptimizerConfig):
    pass

classes = (OptimizerConfig, Derived, DerivedTwice, NoDataclass)
variables = [dict(vars(cls)) for cls in classes]
annotations = [dict(inspect.get_annotations(cls)) for cls in classes]
functions = dict(vars(optimizer))
path = list(sys.meta_path)
positional = [field.default for field in dataclasses.fields(OptimizerConfig)]

import megatron_dos
from megatron_dos.arguments import DosOptions
from megatron_dos.patching.in_memory import is_patched, uninstall
before = is_patched(OptimizerConfig)
megatron_dos.install()
megatron_dos.install()
assert "megatron.training" not in sys.modules, "nobody asked for it"

config = OptimizerConfig(lr=1.0, use_distributed_optimizer=True, use_deep_optimizer_states=True, dos_subgroup_size=5)
other = OptimizerConfig(lr=1.0, use_distributed_optimizer=True, use_deep_optimizer_states=True)
derived = DerivedTwice(own=[1], dos_cpu_threads=1)
stock = OptimizerConfig(use_distributed_optimizer=True)
found = dict(
    before=before,
    now=is_patched(OptimizerConfig),
    same_class=optimizer.OptimizerConfig is OptimizerConfig,
    fields=[field.name for field in dataclasses.fields(OptimizerConfig)][-len(dataclasses.fields(DosOptions)) :],
    positional=OptimizerConfig(0.5).lr,
    value=config.dos_subgroup_size,
    defaults=[OptimizerConfig().use_deep_optimizer_states, OptimizerConfig().dos_subgroup_size],
    equal=[config == other, other == dataclasses.replace(config, dos_subgroup_size=0)],
    in_repr="dos_subgroup_size=5" in repr(config),
    post_init=config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
    post_init_checks=error_of(lambda: OptimizerConfig(exp_avg_dtype=None)),
    derived=[derived.own, derived.hidden, repr(derived), derived.dos_cpu_threads, Derived().own is not Derived().own],
    derived_repr="hidden" in repr(Derived()),
    metadata=dict({f.name: f.metadata for f in dataclasses.fields(DerivedTwice)}["hidden"]),
    derived_positional=Derived(*positional, [2], 4).own,
    no_dataclass=NoDataclass(dos_subgroup_size=2).dos_subgroup_size,
    built=[build(config), build(stock), build(config)],
    name_restored=optimizer.DistributedOptimizer is functions["DistributedOptimizer"],
    refused=[
        error_of(lambda: build(OptimizerConfig(use_deep_optimizer_states=True))),
        error_of(lambda: build(OptimizerConfig(use_distributed_optimizer=True, dos_subgroup_size=5))),
        error_of(lambda: optimizer._get_megatron_emerging_optimizer(
            OptimizerConfig(optimizer="muon", use_deep_optimizer_states=True, use_distributed_optimizer=True), [])),
    ],
)

uninstall()
uninstall()
for cls, old, noted in zip(classes, variables, annotations):
    now = dict(vars(cls))
    assert now.keys() == old.keys(), now.keys() ^ old.keys()
    assert all(now[name] is old[name] for name in old if name != "__annotations__")
    assert inspect.get_annotations(cls) == noted
assert dict(vars(optimizer)) == functions
assert sys.meta_path == path
found["after"] = error_of(lambda: OptimizerConfig(use_deep_optimizer_states=True))[0]
found["built_after"] = build(OptimizerConfig(use_distributed_optimizer=True))
megatron_dos.install()
found["again"] = build(OptimizerConfig(use_distributed_optimizer=True, use_deep_optimizer_states=True))
answer(**found)
"""

TRAINING = """
import importlib
import megatron_dos
from megatron_dos.patching.in_memory import uninstall

LINE = "--use-deep-optimizer-states --dos-subgroup-size 7"

def parse(line, validate):
    os.environ["WORLD_SIZE"] = "1"
    sys.argv = ["pretrain_gpt.py", *'''--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16
        --max-position-embeddings 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --transformer-impl local
        --no-gradient-accumulation-fusion --no-persist-layer-norm --tokenizer-type NullTokenizer --vocab-size 100
        --use-distributed-optimizer'''.split(), *line.split()]
    args = arguments.parse_args()
    validate(args)
    return get_megatron_optimizer_config(args)[0].dos_subgroup_size

def observe():
    return dict(
        values=[parse(LINE, validate) for validate in (arguments.validate_args, user.validate_args)],
        refused=[
            error_of(lambda: parse(LINE + " --optimizer sgd", validate))
            for validate in (arguments.validate_args, user.validate_args)
        ],
        groups=[
            [group.title for group in add(argparse.ArgumentParser())._action_groups].count("deep optimizer states")
            for add in (arguments.add_megatron_arguments, user.add_megatron_arguments)
        ],
        source="def parse_and_validate_args" in inspect.getsource(arguments),
        loader=type(arguments.__spec__.loader).__name__,
    )

megatron_dos.install()
assert "megatron.training" not in sys.modules
import megatron.training.arguments as arguments
from megatron.training.training import get_megatron_optimizer_config
user = types.ModuleType("user_script")  # a script that has imported the functions by name
user.validate_args, user.add_megatron_arguments = arguments.validate_args, arguments.add_megatron_arguments
sys.modules["user_script"] = user
first = observe()
uninstall()
unhooked = not any(
    hasattr(function, "__wrapped__")
    for module in (arguments, user) for function in (module.validate_args, module.add_megatron_arguments)
)
megatron_dos.install()
second = observe()
importlib.reload(arguments)
answer(first=first, unhooked=unhooked, second=second, reloaded=parse(LINE, arguments.validate_args))
"""

PATCHED = """
import megatron.core.optimizer as optimizer
assert optimizer.__file__.startswith(sys.argv[1])
variables = dict(vars(optimizer.OptimizerConfig))
path = list(sys.meta_path)
functions = dict(vars(optimizer))
import megatron_dos
from megatron_dos.patching.in_memory import uninstall
sys.modules["megatron_dos.optimizer"] = stand_in("megatron_dos.optimizer")
for call in (megatron_dos.install, uninstall):
    call()
    assert dict(vars(optimizer.OptimizerConfig)) == variables
    assert dict(vars(optimizer)) == functions
    assert sys.meta_path == path
Config = optimizer.OptimizerConfig
answer(
    on=build(Config(use_distributed_optimizer=True, use_deep_optimizer_states=True)),
    off=build(Config(use_distributed_optimizer=True)),
)
"""

WITHOUT_MEGATRON = """
import importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import megatron_dos
answer(error=error_of(megatron_dos.install), hooks=sum("megatron_dos" in type(f).__module__ for f in sys.meta_path))
"""

CHANGED_MEGATRON = """
import megatron.core.package_info as info
import megatron.core.optimizer as optimizer
import megatron_dos
variables = dict(vars(optimizer.OptimizerConfig))
errors = {}
version = info.__version__
for info.__version__ in ("0.16.1", "0.20.0rc0", "1.19.0", "19"):
    errors[info.__version__] = error_of(megatron_dos.install)
info.__version__ = version
for name in ("DistributedOptimizer", "_get_megatron_optimizer_based_on_param_groups"):
    value = getattr(optimizer, name)
    delattr(optimizer, name)
    errors[name] = error_of(megatron_dos.install)
    setattr(optimizer, name, value)

# A failure in the middle of the work: one derived config cannot take the fields.
@dataclasses.dataclass(order=True)
class Ordered(optimizer.OptimizerConfig):
    pass
functions = dict(vars(optimizer))
errors["Ordered"] = error_of(megatron_dos.install)
assert dict(vars(optimizer)) == functions
assert dict(vars(optimizer.OptimizerConfig)) == variables
assert not any("megatron_dos" in type(finder).__module__ for finder in sys.meta_path)
answer(**errors)
"""


def child(code: str, *arguments: str, path: tuple[Path, ...] = ()) -> dict:
    return megatron_trees.results(PREAMBLE + code, *arguments, path=path)


@pytest.fixture(scope="module")
def core() -> dict:
    return child(CORE)


@pytest.fixture(scope="module")
def training() -> dict:
    return child(TRAINING)


@pytest.fixture(scope="module")
def changed() -> dict:
    return child(CHANGED_MEGATRON)


class TestCore:
    """A framework that uses megatron.core alone."""

    @pytest.fixture
    def found(self, core) -> dict:
        return core

    def test_config_class_gains_the_fields_and_stays_the_same_object(self, found):
        assert found["before"] is False
        assert found["now"] is True
        assert found["same_class"]
        assert found["fields"] == list(DosOptions.types())
        assert found["value"] == 5
        assert found["defaults"] == [False, 0]

    def test_generated_methods_know_the_fields(self, found):
        assert found["equal"] == [False, True]
        assert found["in_repr"]

    def test_what_the_config_did_before_it_does_still(self, found):
        assert found["positional"] == 0.5
        assert found["post_init"] is False
        assert found["post_init_checks"][0] == "AssertionError"

    def test_derived_configs_gain_the_fields_and_keep_their_own(self, found):
        assert found["derived"] == [[1], 3, "by hand", 1, True]
        assert found["derived_positional"] == [2]
        assert found["derived_repr"] is False
        assert found["metadata"] == {"a": 1}
        assert found["no_dataclass"] == 2

    def test_class_is_chosen_by_the_config(self, found):
        assert found["built"] == ["DeepStatesOptimizer", "DistributedOptimizer", "DeepStatesOptimizer"]
        assert found["name_restored"]

    def test_combinations_are_refused_before_anything_is_built(self, found):
        without, subgroups, muon = found["refused"]
        assert {kind for kind, _ in found["refused"]} == {"UnsupportedOptionError"}
        assert "needs --use-distributed-optimizer" in without[1]
        assert "--dos-subgroup-size 5 has no effect without --use-deep-optimizer-states" in subgroups[1]
        assert "--optimizer muon" in muon[1]

    def test_uninstall_restores_everything_and_install_works_again(self, found):
        assert found["after"] == "TypeError"
        assert found["built_after"] == "DistributedOptimizer"
        assert found["again"] == "DeepStatesOptimizer"


class TestTraining:
    """A program that uses megatron.training from an unpatched tree, imported after the hooks or before."""

    @pytest.fixture(params=["first", "second"], ids=["imported after", "imported before"])
    def found(self, request, training) -> dict:
        return training[request.param]

    def test_flags_reach_the_config(self, found):
        assert found["values"] == [7, 7]
        assert found["groups"] == [1, 1]

    def test_combinations_are_refused(self, found):
        for kind, message in found["refused"]:
            assert kind == "UnsupportedOptionError"
            assert "does not work with --optimizer sgd" in message

    def test_module_looks_as_before(self, found):
        assert found["source"]
        assert found["loader"] == "SourceFileLoader"

    def test_uninstall_unhooks_and_reload_hooks_again(self, training):
        assert training["unhooked"]
        assert training["reloaded"] == 7


@pytest.mark.slow
def test_patched_tree_is_left_alone(tmp_path):
    tree = megatron_trees.importable_tree(tmp_path)
    patching.apply(tree)
    assert child(PATCHED, str(tree), path=(tree,)) == {"on": "DeepStatesOptimizer", "off": "DistributedOptimizer"}
    assert {change.path for change in patching.revert(tree).changes} == set(TARGETS)


@pytest.mark.slow
class TestRefused:
    @pytest.mark.parametrize("absent", ["megatron", "torch"])
    def test_no_megatron_or_one_that_cannot_be_imported(self, absent):
        found = child(WITHOUT_MEGATRON, absent)
        kind, message = found["error"]
        assert kind == "InstallError"
        assert f"No module named '{absent}" in message
        assert "pip install megatron-core" in message
        assert patching.known_versions() in message
        assert found["hooks"] == 0

    @pytest.mark.parametrize("version", ["0.16.1", "0.20.0rc0", "1.19.0", "19"])
    def test_unknown_version(self, changed, version):
        kind, message = changed[version]
        assert kind == "InstallError"
        assert f"megatron-core {version} is not known" in message
        assert patching.known_versions() in message

    @pytest.mark.parametrize("name", ["DistributedOptimizer", "_get_megatron_optimizer_based_on_param_groups"])
    def test_megatron_that_was_changed_locally(self, changed, name):
        kind, message = changed[name]
        assert kind == "InstallError"
        assert f"lacks {name}" in message

    def test_failure_halfway_leaves_no_hook(self, changed):
        kind, message = changed["Ordered"]
        assert kind == "InstallError"
        assert "Ordered is not a plain dataclass" in message
