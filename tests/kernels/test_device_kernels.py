# SPDX-License-Identifier: Apache-2.0
"""The update's device kernels but Triton's own code: which one is chosen, what they refuse, and the bits they give."""

from __future__ import annotations

import itertools
import logging
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from device_cases import FACTORS, any_bits, check
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dos.gpu_check.cases import DTYPES, make_case
from megatron_dos.kernels import AdamScalars, device_kernel, elementwise_adam, library_adam, operands, reference

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SCALARS = AdamScalars.at_step(7, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)


@pytest.fixture(autouse=True)
def libraries_are_loaded_anew():
    library_adam.load.cache_clear()
    yield
    library_adam.load.cache_clear()


class TestElementwise:
    @pytest.mark.parametrize("l2_mode", [False, True], ids=["adamw", "l2"])
    @pytest.mark.parametrize("out", [None, *DTYPES])
    @pytest.mark.parametrize("grad", DTYPES)
    def test_every_dtype_gives_the_bits_of_the_reference(self, grad, out, l2_mode):
        rng = np.random.default_rng(len(grad) + 7 * l2_mode)
        for exp_avg, exp_avg_sq in itertools.product(("float32", "bfloat16"), repeat=2):
            case = make_case(rng, 2000, grad, out, exp_avg, exp_avg_sq, l2_mode, grad_scale=0.37)
            check(elementwise_adam.adamw, case, unscale=float(rng.choice(FACTORS)))

    @pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 128, 1000])
    def test_chunks_give_the_bits_of_the_whole(self, monkeypatch, numel):
        monkeypatch.setattr(elementwise_adam, "_CHUNK_ON_HOST", 64)
        check(elementwise_adam.adamw, make_case(np.random.default_rng(numel), numel, "bfloat16", "float16"))

    @settings(max_examples=150, deadline=None)
    @given(any_bits())
    def test_arbitrary_bits_and_scalars_give_the_bits_of_the_reference(self, given_case):
        check(elementwise_adam.adamw, *given_case)

    @pytest.mark.parametrize("l2_mode", [False, True], ids=["adamw", "l2"])
    def test_on_a_gpu_it_is_made_of_operations_that_round_once(self, l2_mode):
        names = set()

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.overloadpacket.__name__
                if not func.is_view and func.namespace == "aten":
                    names.add(name)
                if name.startswith("div"):
                    assert all(isinstance(arg, torch.Tensor) for arg in args[:2]), "a number is divided by"
                if name.startswith(("add", "sub")):
                    assert (kwargs or {}).get("alpha", 1) == 1
                    assert len(args) == 2, "alpha is given"
                return func(*args, **(kwargs or {}))

        scalars = AdamScalars.at_step(2, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=not l2_mode)
        with FakeTensorMode(), Record():
            states, half = fake_cuda()
            elementwise_adam.adamw(*states, half[0], scalars, 0.5, 0.5, half[1])
        arithmetic = {"mul", "mul_", "add_", "sub_", "div", "sqrt_"}
        exact = {"empty", "new_empty", "copy_", "abs", "lt", "isnan", "ne", "masked_fill_"}
        assert names <= arithmetic | exact
        assert arithmetic <= names

    def test_temporaries_do_not_grow_with_the_shard(self):
        sizes = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                if "empty" in func.overloadpacket.__name__:
                    sizes.append(made.numel() * made.element_size())
                return made

        with FakeTensorMode():
            states, half = fake_cuda(10**8)
            with Record():
                elementwise_adam.adamw(*states, half[0], SCALARS, out=half[1])
        assert len(sizes) == 1
        assert sizes[0] < 100e6


def fake_cuda(numel: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 states and bf16 grad and param on a GPU that need not exist, under FakeTensorMode."""
    states = torch.empty((3, numel), device=CUDA)
    return states, torch.empty((2, numel), dtype=torch.bfloat16, device=CUDA)


def stubs_of_libraries(monkeypatch, calls: list) -> None:
    """Modules with the names and signature of Transformer Engine's and Apex's kernel, in plain torch."""

    def multi_tensor_adam(chunk, noop, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
        calls.append({"chunk": chunk, "noop": noop, "mode": mode, "bias_correction": bias_correction})
        assert all(tensor.dtype == torch.float32 for tensors in lists for tensor in tensors)
        for g, p, m, v in zip(*lists, strict=True):
            gradient = g + weight_decay * p if mode == 0 else g
            m.mul_(beta1).add_((1 - beta1) * gradient)
            v.mul_(beta2).add_((1 - beta2) * gradient * gradient)
            update = m / (v.sqrt() + eps)
            p.sub_(lr * (update + weight_decay * p if mode == 1 else update))

    for name in ("amp_C", "transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch"):
        module = ModuleType(name)
        module.multi_tensor_adam = multi_tensor_adam
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]


class TestLibraries:
    @pytest.mark.parametrize("name", library_adam.LIBRARIES)
    @pytest.mark.parametrize("l2_mode", [False, True], ids=["adamw", "l2"])
    @pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_they_follow_the_reference_to_rounding_over_many_steps(self, monkeypatch, name, l2_mode, grad_dtype):
        calls: list = []
        stubs_of_libraries(monkeypatch, calls)
        monkeypatch.setattr(library_adam, "_CHUNK", 1500)
        kernel = library_adam.load(name)
        generator = torch.Generator().manual_seed(1)
        numel, steps, lr = 4000, 20, 1e-2
        states = torch.zeros((3, numel))
        states[0].normal_(generator=generator)
        expected = states.clone().numpy()
        out = torch.zeros(numel, dtype=torch.bfloat16)
        for step in range(1, steps + 1):
            grad = torch.randn(numel, generator=generator).to(grad_dtype)
            kept = grad.clone()
            arguments = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1, "decoupled": not l2_mode}
            scalars = AdamScalars.at_step(step, **arguments)
            kernel(*states, grad, scalars, 2.0**-3, 3.0, out)
            assert torch.equal(grad, kept)
            reference.adamw(*expected, grad.float().mul(2.0**-3).numpy(), scalars, 3.0)
        # The libraries take 1 - beta2 from the float32 beta2: 1e-5 off for 0.999.
        np.testing.assert_allclose(states[1].numpy(), expected[1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(states[2].numpy(), expected[2], rtol=3e-5)
        np.testing.assert_allclose(states[0].numpy(), expected[0], rtol=1e-6, atol=steps * lr * 3e-5)
        assert torch.equal(out, states[0].to(torch.bfloat16))
        for call in calls:
            noop = call.pop("noop")
            assert noop.dtype == torch.int32
            assert noop.tolist() == [0]
            assert call == {"chunk": 65536, "mode": 0 if l2_mode else 1, "bias_correction": 0}
        assert len(calls) == (0 if name == "torch" else 3 * steps)

    def test_without_weight_decay_or_learning_rate_params_stay(self):
        for lr, weight_decay in ((0.0, 0.0), (0.0, 0.1)):
            scalars = AdamScalars.at_step(1, lr, (0.9, 0.999), 1e-8, weight_decay, decoupled=True)
            states = torch.zeros((3, 5))
            states[0] = torch.arange(5.0)
            library_adam.load("torch")(*states, torch.ones(5), scalars)
            assert states[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]

    @pytest.mark.parametrize("name", ["te", "apex"])
    def test_a_missing_library_is_named_with_the_way_out(self, monkeypatch, name):
        for module in ("amp_C", "transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(RuntimeError, match=f"^--dos-gpu-kernel {name}: .* cannot be loaded .* auto"):
            device_kernel.select(name, CUDA)

    def test_their_rounding_is_said_once(self, monkeypatch, caplog):
        stubs_of_libraries(monkeypatch, [])
        caplog.set_level(logging.WARNING)
        for _ in range(2):
            device_kernel.select("te", CUDA)
        device_kernel.select("torch", CPU)
        assert caplog.messages == [
            f"--dos-gpu-kernel {name}: results follow {library}'s rounding: no longer bit-identical across placements"
            for name, library in (("te", "Transformer Engine"), ("torch", "torch"))
        ]


class TestChoice:
    @pytest.mark.parametrize("name", ["auto", "triton"])
    @pytest.mark.parametrize("grad", DTYPES)
    def test_on_host_memory_the_cpp_kernel_gives_the_bits_of_the_reference(self, name, grad):
        kernel = device_kernel.select(name, CPU, threads=1)
        for unscale, grad_scale in itertools.product(FACTORS, FACTORS):
            case = make_case(np.random.default_rng(2), 1000, grad, "bfloat16", grad_scale=grad_scale)
            check(kernel, case, unscale)

    def test_unknown_names_are_refused_with_those_there_are(self):
        with pytest.raises(ValueError, match="--dos-gpu-kernel cuda: must be one of auto, triton, te, apex, torch"):
            device_kernel.select("cuda", CUDA)

    @pytest.mark.parametrize("name", ["te", "apex"])
    def test_cuda_libraries_are_refused_on_host_memory(self, name):
        with pytest.raises(ValueError, match=f"--dos-gpu-kernel {name}: .* needs a CUDA GPU.* auto"):
            device_kernel.select(name, CPU)

    @pytest.mark.parametrize("name", ["auto", "triton"])
    def test_triton_is_the_choice_on_a_gpu(self, monkeypatch, name):
        triton_adam = pytest.importorskip("megatron_dos.kernels.triton_adam")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device_kernel.select(name, CUDA) is triton_adam.adamw

    @pytest.fixture
    def without_triton(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "megatron_dos.kernels.triton_adam", raising=False)
        monkeypatch.delattr("megatron_dos.kernels.triton_adam", raising=False)

    def test_torch_operations_stand_in_for_a_missing_triton(self, without_triton, caplog):
        assert device_kernel.select("auto", CUDA) is elementwise_adam.adamw
        assert "Triton does not work here" in caplog.text

    def test_a_triton_that_was_asked_for_is_not_replaced(self, without_triton):
        with pytest.raises(RuntimeError, match=r"--dos-gpu-kernel triton: Triton cannot be loaded.* auto"):
            device_kernel.select("triton", CUDA)

    def test_torch_operations_stand_in_for_a_triton_that_fails_at_run_time(self, monkeypatch, caplog):
        def fails(*arguments, **keywords):
            raise RuntimeError("Failed to find C compiler")

        triton_adam = pytest.importorskip("megatron_dos.kernels.triton_adam")
        monkeypatch.setattr(triton_adam, "adamw", fails)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with FakeTensorMode():
            assert device_kernel.select("auto", CUDA) is elementwise_adam.adamw
        assert "Failed to find C compiler" in caplog.text


KERNELS = {
    "elementwise": lambda: elementwise_adam.adamw,
    "triton": lambda: pytest.importorskip("megatron_dos.kernels.triton_adam").adamw,
    "torch": lambda: library_adam.load("torch"),
}

MISFITS = {
    "exp_avg-dtype": ("exp_avg", TypeError, lambda t: t.half()),
    "param-dtype": ("param", TypeError, lambda t: t.bfloat16()),
    "grad-dtype": ("grad", TypeError, lambda t: t.double()),
    "grad-type": ("grad", TypeError, lambda t: [1.0]),
    "grad-device": ("grad", ValueError, lambda t: torch.empty(100)),
    "exp_avg_sq-device": ("exp_avg_sq", ValueError, lambda t: torch.empty(100)),
    "out-shape": ("out", ValueError, lambda t: t.view(10, 10)),
    "out-length": ("out", ValueError, lambda t: t[1:]),
    "exp_avg-stride": ("exp_avg", ValueError, lambda t: torch.empty(200, device=CUDA)[::2]),
}


@pytest.mark.parametrize("kernel", KERNELS)
class TestOperands:
    """On fake CUDA tensors: no GPU is needed to find a wrong operand."""

    @pytest.mark.parametrize("misfit", MISFITS)
    def test_a_misfit_is_refused_by_name(self, kernel, misfit):
        name, error, make = MISFITS[misfit]
        with FakeTensorMode():
            arguments = self.arguments()
            arguments[name] = make(arguments[name])
            with pytest.raises(error, match=f"^{name}: "):
                KERNELS[kernel]()(**arguments)

    @pytest.mark.parametrize("name", ["unscale", "grad_scale"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
    def test_factors_must_be_finite_in_float32(self, kernel, name, value):
        with FakeTensorMode(), pytest.raises(ValueError, match=f"^{name}: must be finite"):
            KERNELS[kernel]()(**self.arguments(), **{name: value})

    def test_fitting_operands_pass_and_nothing_runs(self, kernel):
        with FakeTensorMode():
            KERNELS[kernel]()(**self.arguments(), unscale=0.5, grad_scale=0.5)

    @staticmethod
    def arguments() -> dict:
        states, half = fake_cuda()
        names = ("param", "exp_avg", "exp_avg_sq")
        return {**dict(zip(names, states, strict=True)), "grad": half[0], "out": half[1], "scalars": SCALARS}


def test_the_scaled_grad_is_the_grad_itself_where_nothing_changes():
    grad = torch.arange(4.0)
    assert operands.scaled_grad(grad, 1.0, 1.0) is grad
    scaled = operands.scaled_grad(grad, 2.0, 0.25)
    assert scaled.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert grad.tolist() == [0.0, 1.0, 2.0, 3.0]
