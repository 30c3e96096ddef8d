# SPDX-License-Identifier: Apache-2.0
"""`main_param` is answered from the masters when it is asked for, and is in nobody's way."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from test_engine import NUMELS, make_engine, random_params, scalars_at

from megatron_dos.adapter import main_params
from megatron_dos.adapter.main_params import answer_main_param
from megatron_dos.update.operations import StepInputs


def make(**options):
    """An engine and the 16-bit params that are known to have their masters there, by owner."""
    values = random_params()
    engine = make_engine(values, 1000, **options)
    params = {i: torch.nn.Parameter(value) for i, value in enumerate(values) if value.dtype != torch.float32}
    for owner, param in params.items():
        param.main_param = None  # as Megatron leaves it
        answer_main_param(param, engine, owner)
    return engine, params


@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_its_norm_is_that_of_the_master_now(share):
    engine, params = make(resident_share=share)
    for step in range(1, 3):
        for owner, param in params.items():
            whole = torch.cat(engine.owner_parts(owner)["master"]).double().norm().item()
            assert param.main_param.norm().item() == pytest.approx(whole, rel=1e-5)
            assert (param.main_param.dtype, param.main_param.shape) == (torch.float32, (1,))
        engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(step, 0.1)] * len(NUMELS)))


def test_changes_by_anybody_are_seen_at_once():
    engine, params = make()
    view = engine.owner_states(5)["master"]
    assert params[5].main_param.item() > 0
    view.zero_()
    assert params[5].main_param.item() == 0


@pytest.mark.parametrize("torch_threads", [1, 2])
def test_a_large_master_is_taken_in_chunks(monkeypatch, torch_threads):
    monkeypatch.setattr(main_params, "_CHUNK", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(torch_threads)
    try:
        engine, params = make(resident_share=0.37)
        whole = engine.owner_states(5)["master"].double().norm().item()
        assert params[5].main_param.item() == pytest.approx(whole, rel=1e-7)
    finally:
        torch.set_num_threads(before)


def test_steps_compute_none(monkeypatch):
    engine, params = make()
    asked = []
    monkeypatch.setattr(main_params, "_norm", lambda parts, threads: asked.append(1) or torch.zeros(1))
    engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(1, 0.1)] * len(NUMELS)))
    assert not asked
    assert params[0].main_param == 0
    assert asked


class TestOtherParams:
    def test_have_none(self):
        engine, _ = make()
        stranger = torch.nn.Parameter(torch.ones(3))
        assert not hasattr(stranger, "main_param")
        assert getattr(stranger, "main_param", None) is None
        with pytest.raises(AttributeError, match="'Parameter' object has no attribute 'main_param'"):
            _ = stranger.main_param
        del engine

    def test_keep_what_another_optimizer_gives_them(self):
        engine, params = make()
        theirs, stranger = torch.ones(3), torch.nn.Parameter(torch.ones(3))
        for param in (stranger, params[0]):  # one that was ours, too
            param.main_param = theirs
            assert param.main_param is theirs
        del engine

    def test_are_of_the_class_that_they_were_of(self):
        _, params = make()
        assert all(type(param) is torch.nn.Parameter for param in params.values())


class TestCopies:
    def test_a_copy_has_none(self):
        engine, params = make()
        module = torch.nn.ParameterList(params.values())
        assert not any(hasattr(param, "main_param") for param in copy.deepcopy(module))
        assert hasattr(module[0], "main_param")
        del engine

    def test_a_module_can_be_saved_and_loaded(self):
        engine, params = make()
        module, file = torch.nn.ParameterList(params.values()), io.BytesIO()
        module[0].main_param_sharded = True  # so that attributes are saved with it
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert all(torch.equal(one, other) for one, other in zip(loaded, module, strict=True))
        assert loaded[0].main_param_sharded
        assert not hasattr(loaded[0], "main_param")
        del engine


class TestLives:
    def test_the_states_do_not_outlive_their_optimizer(self):
        engine, params = make()
        gone = weakref.ref(engine)
        assert params[0].main_param is not None
        del engine
        gc.collect()
        assert gone() is None
        assert not hasattr(params[0], "main_param")

    def test_params_do_not_outlive_their_model(self):
        engine, params = make()
        known = len(main_params._known)
        count = len(params)
        params.clear()
        gc.collect()
        assert len(main_params._known) <= known - count
        del engine

    def test_the_last_optimizer_answers(self):
        _, params = make()
        engine = make_engine([torch.full_like(value, 2) for value in random_params()], 1000)
        answer_main_param(params[5], engine, 5)
        assert params[5].main_param.item() == pytest.approx(2 * NUMELS[5] ** 0.5)
