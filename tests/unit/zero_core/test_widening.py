"""Widened products against exact ones: forward and gradients, what is saved, what is left to torch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zero_core import ZeroConfig, widened_products, widening
from zero_core.config import Products
from zero_core.errors import ConfigError
from zero_core.widening import WidenedProducts, unseen, widens

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LOW = [torch.bfloat16, torch.float16]

Op = Callable[..., torch.Tensor]
PRODUCTS: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 12), (7, 12)]),
    "linear with bias": (F.linear, [(2, 3, 12), (7, 12), (7,)]),
    "linear, one row": (F.linear, [(1, 12), (7, 12), (7,)]),
    "linear, four dimensions": (F.linear, [(2, 3, 2, 12), (7, 12), (7,)]),
    "linear of a transposed input": (lambda x, w: F.linear(x.transpose(0, 1), w), [(4, 3, 12), (7, 12)]),
    "mm": (torch.mm, [(5, 12), (12, 7)]),
    "matmul, broadcast weight": (torch.matmul, [(2, 5, 12), (12, 7)]),
    "addmm": (torch.addmm, [(7,), (5, 12), (12, 7)]),
    "addmm, a column added": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(5, 1), (5, 12), (12, 7)],
    ),
    "bmm": (torch.bmm, [(3, 5, 12), (3, 12, 7)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5), [(5, 7), (3, 5, 12), (3, 12, 7)]),
    "einsum": (lambda a, b: torch.einsum("bsh,oh->bso", a, b), [(2, 5, 12), (7, 12)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 4, 9), (6, 4, 3), (6,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, groups=2), [(2, 4, 6, 6), (6, 2, 3, 3)]),
}  # fmt: skip
Q = (3, 2, 6, 8)
CHAINED: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "matmul, broadcast batch": (torch.matmul, [(2, 1, 5, 12), (3, 12, 7)]),
    "attention": (F.scaled_dot_product_attention, [Q] * 3),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [Q] * 3),
    "scaled": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.1), [Q] * 3),
    "other keys": (F.scaled_dot_product_attention, [Q, (3, 2, 4, 8), (3, 2, 4, 8)]),
    "masked": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril()),
        [Q] * 3,
    ),
    "a mask for each sample": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, _bias().to(q.dtype)),
        [Q] * 3,
    ),
    "a mask that is trained": (F.scaled_dot_product_attention, [*[Q] * 3, (6, 6)]),
}  # fmt: skip
"""Their gradients go through a value that has been rounded, or add up such values."""


def _bias() -> torch.Tensor:
    return (torch.arange(3 * 6 * 6).reshape(3, 1, 6, 6) - 50) / 64  # the same in all dtypes


class Passed(TorchDispatchMode):
    """What reaches torch: operations with the dtypes of their tensors, and the sizes of fp32 results."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[torch.dtype] = []
        self.fp32_elements = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in widening.PRODUCTS:
            self.products += [value.dtype for value in args if isinstance(value, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.fp32_elements.append(result.numel())
        return result


def inputs(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def run(op: Op, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of a weighted sum of it."""
    out = op(*operands)
    weights = torch.linspace(-1, 1, out.numel()).to(torch.bfloat16).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(operands), weights)]


def exact(op: Op, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return run(op, [operand.detach().double().requires_grad_() for operand in operands])


def assert_rounded_once(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Not further from the exact fp64 value than one rounding to `dtype`, and what fp32 may add."""
    assert got.dtype == dtype
    half_ulp = torch.finfo(dtype).eps / 2 * want.abs()
    apart = (got.double() - want).abs()
    assert (apart <= half_ulp * 1.001 + 1e-5).all(), float((apart - half_ulp).max())


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_are_exact_ones_rounded_once(name: str, dtype: torch.dtype) -> None:
    op, shapes = PRODUCTS[name]
    operands = inputs(shapes, dtype)
    with Passed() as passed, WidenedProducts(dtype):
        found = run(op, operands)
    assert passed.products
    assert set(passed.products) == {torch.float32}, "none was left to torch"
    for got, want in zip(found, exact(op, operands), strict=True):
        assert got.shape == want.shape
        assert_rounded_once(got, want, dtype)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", CHAINED)
def test_attention_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    op, shapes = CHAINED[name]
    operands = inputs(shapes, dtype)
    with Passed() as passed, WidenedProducts(dtype):
        found = run(op, operands)
    assert set(passed.products) == {torch.float32}
    want = exact(op, operands)
    assert_rounded_once(found[0], want[0], dtype)
    for got, gradient in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(got.double(), gradient, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", [*PRODUCTS, *CHAINED])
def test_in_pieces_it_is_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    op, shapes = (PRODUCTS | CHAINED)[name]
    operands = inputs(shapes, dtype)
    with WidenedProducts(dtype):
        want = run(op, operands)
        monkeypatch.setattr(widening, "PIECE_ELEMENTS", 1)
        monkeypatch.setattr(widening, "_STEP", 2)
        found = run(op, operands)
    for got, whole in zip(found, want, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), whole.double(), rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(("m", "k", "n"), [(16, 8, 16384), (16384, 8, 16), (16, 16384, 8)])
def test_no_whole_fp32_copy_of_a_large_operand(
    m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widening, "PIECE_ELEMENTS", 4096)
    a, b = (tensor.detach() for tensor in inputs([(m, k), (k, n)], torch.bfloat16))
    with Passed() as passed, WidenedProducts(torch.bfloat16):
        got = a @ b
    assert max(passed.fp32_elements) <= 4096
    want = a.double() @ b.double()
    half_ulp = torch.finfo(torch.bfloat16).eps / 2 * want.abs()
    assert ((got.double() - want).abs() <= half_ulp + k * 1e-6).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(2048, 256, 512), (300, 2000, 1024), (512, 256, 8192)])
def test_what_a_product_holds_beside_its_result_is_bounded_and_gone_with_it(
    m: int, k: int, n: int, bias: bool
) -> None:
    """As the allocator sees it, with what torch's own operations take: 2 MiB of pieces, one matrix whole."""
    a, b, c = (tensor.detach() for tensor in inputs([(m, k), (k, n), (n,)], torch.bfloat16))
    with torch.profiler.profile(profile_memory=True) as profiled, WidenedProducts(torch.bfloat16):
        out = torch.addmm(c, a, b) if bias else a @ b
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    assert held[-1] == out.nbytes, "nothing else is left"
    shorter = sorted((m, k, n))[:2]
    assert 0 < max(held) - out.nbytes <= 4 * shorter[0] * shorter[1] + (2 << 20) * (1 + bias)


@pytest.mark.parametrize("dtype", LOW)
def test_errors_are_not_larger_than_torchs_own(dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.detach() for tensor in inputs([(33, 768), (65, 768), (65,)], dtype, seed=4))
    want = F.linear(x.double(), weight.double(), bias.double())
    native = (F.linear(x, weight, bias).double() - want).abs().max()
    with widened_products(dtype, CPU, setting="widened"):
        widened = F.linear(x, weight, bias)
    assert (widened.double() - want).abs().max() <= native
    nearest = want.to(dtype)
    one_ulp = torch.finfo(dtype).eps * nearest.double().abs()
    fp32_error = 768 * torch.finfo(torch.float32).eps  # of sums of terms near 1 that cancel
    assert ((widened.double() - nearest.double()).abs() <= one_ulp + fp32_error).all()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_what_is_saved_for_backward_is_what_torch_saves(kind: str, dtype: torch.dtype) -> None:
    """No fp32 copy; a parameter is saved as itself, so that stage 3 knows it and keeps a reference."""
    if kind == "linear":
        op, shapes = PRODUCTS["linear with bias"]
    else:
        op, shapes = CHAINED["causal"]
    operands = inputs(shapes, dtype)
    saved: dict[bool, list[tuple[Any, ...]]] = {}
    for widen in (False, True):
        seen = saved[widen] = []

        def pack(tensor: torch.Tensor, seen: list[tuple[Any, ...]] = seen) -> torch.Tensor:
            own = [i for i, operand in enumerate(operands) if operand.data_ptr() == tensor.data_ptr()]
            seen.append((tensor.dtype, tensor.shape, own))
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with WidenedProducts(dtype) if widen else nullcontext(), hooks:
            op(*operands)
    assert saved[True] == saved[False] != []
    assert any(own for _, _, own in saved[True])
    assert {kept for kept, shape, _ in saved[True] if len(shape) != 3 or kind == "linear"} == {dtype}


@pytest.mark.parametrize("dtype", LOW)
def test_dropped_attention_draws_alike_when_it_is_recomputed(dtype: torch.dtype) -> None:
    operands = inputs([Q] * 3, dtype)

    def op(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, dropout_p=0.4)

    def recomputed(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(op, *tensors, use_reentrant=False)
        return out

    found = []
    for way in (op, recomputed):
        torch.manual_seed(3)
        with WidenedProducts(dtype):
            found.append(run(way, operands))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with WidenedProducts(dtype):
        assert not torch.equal(found[0][0], op(*operands)), "another draw drops others"


def test_a_result_that_is_not_wanted_of_beta_is_not_read() -> None:
    a, b = (t.detach() for t in inputs([(3, 4), (4, 5)], torch.bfloat16))
    with WidenedProducts(torch.bfloat16):
        got = torch.addmm(torch.full((5,), torch.nan, dtype=torch.bfloat16), a, b, beta=0)
    assert_rounded_once(got, a.double() @ b.double(), torch.bfloat16)


def test_out_is_written() -> None:
    a, b = (t.detach() for t in inputs([(3, 4), (4, 5)], torch.bfloat16))
    out = torch.empty(3, 5, dtype=torch.bfloat16)
    with Passed() as passed, WidenedProducts(torch.bfloat16):
        assert torch.mm(a, b, out=out) is out
    assert set(passed.products) == {torch.float32}
    assert_rounded_once(out, a.double() @ b.double(), torch.bfloat16)


def test_without_gradients_and_in_inference_mode() -> None:
    op, shapes = PRODUCTS["linear with bias"]
    operands = inputs(shapes, torch.bfloat16)
    with WidenedProducts(torch.bfloat16):
        want = op(*operands)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                got = op(*operands)
            assert not got.requires_grad
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: F.linear(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3)),
        lambda: torch.mm(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.float16)),
        lambda: torch.mm(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)),
        lambda: torch.bmm(*[torch.ones(2, 3, 4, dtype=torch.bfloat16)] * 2),
        lambda: torch.addmm(*[torch.ones(2, 2, dtype=torch.bfloat16)] * 2, torch.ones(2, 2)),
        lambda: torch.addmm(
            torch.ones(3, dtype=torch.bfloat16), *[torch.ones(2, 2, dtype=torch.bfloat16)] * 2
        ),
        lambda: torch.bmm(
            torch.ones(3, 2, 2, dtype=torch.bfloat16), torch.ones(4, 2, 2, dtype=torch.bfloat16)
        ),
        lambda: torch.baddbmm(
            torch.ones(3, dtype=torch.bfloat16), *[torch.ones(2, 2, 2, dtype=torch.bfloat16)] * 2
        ),
        lambda: torch.baddbmm(
            torch.ones(1, 2, 2, 2, dtype=torch.bfloat16), *[torch.ones(2, 2, 2, dtype=torch.bfloat16)] * 2
        ),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(wrong: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError) as native:
        wrong()
    with WidenedProducts(torch.bfloat16), pytest.raises(RuntimeError) as widened:
        wrong()
    assert str(widened.value) == str(native.value)


def test_other_dtypes_and_empty_operands_are_left_alone() -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.float16):
        a, b = torch.arange(6).reshape(2, 3).to(dtype), torch.arange(12).reshape(3, 4).to(dtype)
        want = a @ b
        with Passed() as passed, WidenedProducts(torch.bfloat16):
            assert torch.equal(a @ b, want)
        assert set(passed.products) == {dtype}
    with WidenedProducts(torch.bfloat16):
        nothing = torch.ones(2, 0, dtype=torch.bfloat16) @ torch.ones(0, 4, dtype=torch.bfloat16)
    assert torch.equal(nothing, torch.zeros(2, 4, dtype=torch.bfloat16))


def test_modules_of_several_products() -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.LSTM(8, 8, batch_first=True),
    ]
    x = torch.randn(2, 5, 8)
    for module in modules:
        arguments = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        want = module(*arguments)
        low = [argument.bfloat16() for argument in arguments]
        with Passed() as passed, WidenedProducts(torch.bfloat16):
            got = module.bfloat16()(*low)
            (got if isinstance(got, torch.Tensor) else got[0]).float().sum().backward()
        assert set(passed.products) == {torch.float32}, type(module)
        pair = [value if isinstance(value, torch.Tensor) else value[0] for value in (got, want)]
        torch.testing.assert_close(pair[0].float(), pair[1], rtol=5e-2, atol=5e-2)


def test_hooks_that_do_the_engines_own_work_are_not_seen() -> None:
    a, b = (t.detach() for t in inputs([(3, 4), (4, 5)], torch.bfloat16))
    hidden = unseen(torch.mm)
    with Passed() as passed:
        got = hidden(a, b)
        assert passed.products == []
        torch.mm(a, b)
        assert passed.products == [torch.bfloat16] * 2
    assert torch.equal(got, torch.mm(a, b))


@pytest.mark.parametrize(
    ("setting", "dtype", "device", "kernels", "want"),
    [
        ("auto", torch.bfloat16, CPU, False, True),
        ("auto", torch.float16, CPU, False, True),
        ("auto", torch.bfloat16, CPU, True, False),
        ("auto", torch.float32, CPU, False, False),
        ("auto", torch.bfloat16, GPU, False, False),
        ("native", torch.bfloat16, CPU, False, False),
        ("native", torch.bfloat16, GPU, False, False),
        ("widened", torch.float16, CPU, True, True),
        ("widened", torch.float32, CPU, False, False),
    ],
)
def test_when_products_are_widened(
    setting: Products, dtype: torch.dtype, device: torch.device, kernels: bool, want: bool
) -> None:
    assert widens(setting, dtype, device, kernels=lambda _: kernels) is want


def test_each_dtype_is_asked_for_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "has_kernels", lambda dtype: dtype == torch.bfloat16)
    assert isinstance(widened_products(torch.float16, CPU), WidenedProducts)
    assert isinstance(widened_products(torch.bfloat16, CPU), nullcontext)
    assert isinstance(widened_products(torch.float32, CPU), nullcontext)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"'widened' and the device is cuda:0: .*'auto' or 'native'"):
        widened_products(torch.bfloat16, GPU, setting="widened")
    with pytest.raises(ConfigError, match="low_precision_products 'fast' must be 'auto', 'native'"):
        ZeroConfig(low_precision_products="fast")  # type: ignore[arg-type]
