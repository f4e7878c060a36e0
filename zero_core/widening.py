"""Matrix products in bf16 and fp16 on processors without instructions for them: widened, in fp32.

Owns which products are widened and how. There torch computes them with scalar code, about ten times slower
than in fp32. Here the operands are widened to fp32, multiplied by the fp32 kernel, which accumulates in fp32
as such instructions do, and the result is rounded once. It acts below autograd: what is saved for backward,
hooks on it, derivatives and random draws are torch's own, and backward's products are widened like forward's.

Knows nothing of units, stages and steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_core.config import Products
from zero_core.errors import ConfigError

_aten = torch.ops.aten
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

PIECE_ELEMENTS = 1 << 19
"""Elements that a product widens at a time, 2 MiB: no fp32 copy of a whole large weight ever exists."""

_STEP = 64
"""Pieces of matrices begin at multiples of so many rows or columns."""


def widens(
    setting: Products, dtype: torch.dtype, device: torch.device, *, kernels: Callable[[torch.dtype], bool]
) -> bool:
    """Whether products in `dtype` on `device` are to be widened.

    kernels  whether torch has kernels of its own for products in a dtype on this CPU

    Raises ConfigError where `setting` asks for it on a device that needs none.
    """
    if setting == "widened" and device.type != "cpu":
        raise ConfigError(
            f"low_precision_products is 'widened' and the device is {device}: widening is for CPUs without "
            "instructions for bf16 or fp16; set it to 'auto' or 'native'"
        )
    if dtype not in (torch.bfloat16, torch.float16) or device.type != "cpu" or setting == "native":
        return False
    return setting == "widened" or not kernels(dtype)


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of bf16 or fp16 by vector instructions on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def widened_products(
    dtype: torch.dtype, device: torch.device, *, setting: Products = "auto"
) -> AbstractContextManager[Any]:
    """A context, to be entered as often as one likes, for forward as well as for backward.

    Within it products of CPU tensors of `dtype` are widened if `setting` says so ("auto": where torch has no
    kernels for them); all else is as ever. Raises ConfigError for "widened" on a device other than the CPU.
    """
    if widens(setting, dtype, device, kernels=has_kernels):
        return WidenedProducts(dtype)
    return nullcontext()


def unseen(hook: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """A hook that does the engine's own work: no mode sees it, which costs ten microseconds an operation."""

    @wraps(hook)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if torch.compiler.is_compiling():  # it traces a module's hooks, and no mode is entered then
            return hook(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            return hook(*args, **kwargs)

    return run


class WidenedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, and computes the products of `dtype` itself.

    What has operands of another dtype, or of several, on another device, sparse or empty is left to torch,
    which raises as ever.

    dtype  torch.bfloat16 or torch.float16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled modules stay compiled: else torch.compile runs them eagerly while the mode is entered."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        compute = PRODUCTS.get(func)
        if compute is not None:
            result = compute(self._dtype, *args, **named)
            if result is not None:
                return result
        return func(*args, **named)


def _fit(dtype: torch.dtype, *operands: torch.Tensor | None) -> bool:
    """Whether the operands are plain CPU tensors of one dtype, of which there is something to multiply."""
    for operand in operands:
        if operand is not None and not (
            operand.dtype == dtype
            and operand.is_cpu
            and operand.layout == torch.strided
            and operand.numel() > 0
            and type(operand).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        ):
            return False
    return True


def _multiply(
    dtype: torch.dtype, dims: int, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None
) -> bool:
    """Whether the operands fit, and `added` broadcasts to `a @ b`, of matrices (2 dims) or of batches (3)."""
    if not _fit(dtype, a, b, added) or not a.dim() == b.dim() == dims:
        return False
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        return False
    return added is None or _expands(added, (*a.shape[:-1], b.shape[-1]))


# Each of the following computes one of torch's operations, whose arguments come after the dtype. Where the
# operands do not fit it returns None: torch then computes it, or says what is wrong with it.


def _mm(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    return _matrix_product(a, b) if _multiply(dtype, 2, a, b) else None


def _addmm(
    dtype: torch.dtype,
    added: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor | None:
    if not _multiply(dtype, 2, a, b, added):
        return None
    return _matrix_product(a, b, added=added, beta=beta, alpha=alpha)


def _bmm(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    return _batch_product(a, b) if _multiply(dtype, 3, a, b) else None


def _baddbmm(
    dtype: torch.dtype,
    added: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor | None:
    if not _multiply(dtype, 3, a, b, added):
        return None
    return _batch_product(a, b, added=added, beta=beta, alpha=alpha)


def _attention(
    dtype: torch.dtype,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """torch's fused attention; its log-sum stays in fp32."""
    if not _fit(dtype, query, key, value, attn_mask):
        return None
    pieces = []
    for part in _batch_parts(query, key):
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            *(tensor[part].float() for tensor in (query, key, value)),
            dropout_p,
            is_causal,
            attn_mask=_mask_part(attn_mask, part),
            scale=scale,
        )
        pieces.append((out.to(dtype), log_sum))
    return _joined(pieces)


def _attention_backward(
    dtype: torch.dtype,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...] | None:
    if not _fit(dtype, grad, query, key, value, out, attn_mask):
        return None
    pieces = []
    for part in _batch_parts(query, key):
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *(tensor[part].float() for tensor in (grad, query, key, value, out, log_sum)),
            dropout_p,
            is_causal,
            attn_mask=_mask_part(attn_mask, part),
            scale=scale,
        )
        pieces.append(tuple(gradient.to(dtype) for gradient in gradients))
    return _joined(pieces)


def _convolution(
    dtype: torch.dtype, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor | None:
    if not _fit(dtype, inputs, weight, bias):
        return None
    wide = None if bias is None else bias.float()
    result: torch.Tensor = _aten.convolution.default(inputs.float(), weight.float(), wide, *rest)
    return result.to(dtype)


def _convolution_backward(
    dtype: torch.dtype, grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...] | None:
    if not _fit(dtype, grad, inputs, weight):
        return None
    gradients = _aten.convolution_backward.default(grad.float(), inputs.float(), weight.float(), *rest)
    return tuple(None if gradient is None else gradient.to(dtype) for gradient in gradients)


def _into(compute: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """The form with `out=`, which compiled code calls."""

    def write(dtype: torch.dtype, *args: Any, out: torch.Tensor, **named: Any) -> torch.Tensor | None:
        result = compute(dtype, *args, **named) if _fit(dtype, out) else None
        if result is None or result.shape != out.shape:
            return None
        return out.copy_(result)

    return write


PRODUCTS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.mm.out: _into(_mm),
    _aten.addmm.out: _into(_addmm),
    _aten.bmm.out: _into(_bmm),
    _aten.baddbmm.out: _into(_baddbmm),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
"""What `linear`, `matmul`, `einsum`, attention and convolutions come down to below autograd.

A matrix times a vector, and what goes element by element, is not slow and not here.
"""


def _matrix_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    added: torch.Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """`beta * added + alpha * a @ b`, rounded once: [m, k] times [k, n], of one dtype; `added` broadcasts.

    What is larger than a piece goes along the longest of the three sizes in pieces, so that beside them only
    the matrix of the two shorter sizes is ever whole in fp32. Where that is k, pieces are added up in fp32.
    """
    (m, k), n = a.shape, b.shape[1]
    if m * k + k * n + m * n <= PIECE_ELEMENTS:
        if added is None:
            return torch.mm(a.float(), b.float()).to(a.dtype)
        return torch.addmm(added.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    out = a.new_empty(m, n)
    added = None if added is None else added.expand(m, n)
    longest = max(m, k, n)
    size = max(_STEP, PIECE_ELEMENTS // (m + k + n - longest) // _STEP * _STEP)
    pieces = [slice(start, start + size) for start in range(0, longest, size)]

    def finish(product: torch.Tensor, rows: slice, columns: slice) -> None:
        if alpha != 1:
            product.mul_(alpha)
        if added is not None and beta != 0:
            product.add_(added[rows, columns], alpha=beta)
        out[rows, columns] = product

    everything = slice(None)
    if k == longest:
        total = torch.mm(a[:, pieces[0]].float(), b[pieces[0]].float())
        for piece in pieces[1:]:
            total.addmm_(a[:, piece].float(), b[piece].float())
        finish(total, everything, everything)
    elif n == longest:
        whole = a.float()
        for piece in pieces:
            finish(torch.mm(whole, b[:, piece].float()), everything, piece)
    else:
        whole = b.float()
        for piece in pieces:
            finish(torch.mm(a[piece].float(), whole), piece, everything)
    return out


def _batch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    added: torch.Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """The same for every matrix of a batch: [batch, m, k] times [batch, k, n], as many at a time as fit."""
    (batch, m, k), n = a.shape, b.shape[2]
    size = PIECE_ELEMENTS // (m * k + k * n + m * n)
    if size >= batch:
        if added is None:
            return torch.bmm(a.float(), b.float()).to(a.dtype)
        return torch.baddbmm(added.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    out = a.new_empty(batch, m, n)
    added = None if added is None else added.expand(batch, m, n)
    if size == 0:
        for index in range(batch):
            more = None if added is None else added[index]
            out[index] = _matrix_product(a[index], b[index], added=more, beta=beta, alpha=alpha)
        return out
    for start in range(0, batch, size):
        piece = slice(start, start + size)
        more = None if added is None else added[piece]
        out[piece] = _batch_product(a[piece], b[piece], added=more, beta=beta, alpha=alpha)
    return out


def _expands(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the tensor broadcasts to just that shape."""
    missing = len(shape) - tensor.dim()
    sizes = zip(tensor.shape, shape[max(missing, 0) :], strict=False)
    return missing >= 0 and all(own in (1, size) for own, size in sizes)


def _batch_parts(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Parts of the batch, [batch, heads, sequence, head size], that fit the piece; one sample at least."""
    batch = query.shape[0]
    size = max(1, PIECE_ELEMENTS * batch // (query.numel() + 2 * key.numel()))
    for start in range(0, batch, size):
        yield slice(start, start + size)


def _mask_part(mask: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """Of a mask [batch or 1, heads or 1, sequence, sequence], or without the first two, widened."""
    if mask is None:
        return None
    return (mask[part] if mask.dim() == 4 and mask.shape[0] > 1 else mask).float()


def _joined(pieces: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Results over parts of the batch as results over the batch."""
    if len(pieces) == 1:
        return pieces[0]
    # With the sequence before the heads in memory, as torch has it: the model's next view needs no copy then.
    return tuple(
        torch.cat([part.transpose(1, 2) for part in parts]).transpose(1, 2)
        for parts in zip(*pieces, strict=True)
    )
