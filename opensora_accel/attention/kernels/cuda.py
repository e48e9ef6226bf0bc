"""torch's fused kernels for NVIDIA and AMD GPUs: flash, cuDNN and memory-efficient attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.attention.kernels.base import (
    Grads,
    Problem,
    Scores,
    dense_rows,
    expand_heads,
    key_bias,
    sum_groups,
)

_HALF = (torch.float16, torch.bfloat16)


def _refuses_on_any(problem: Problem, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if problem.device.type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device.type}"
    if problem.dtype not in dtypes:
        return f"it takes {' or '.join(map(str, dtypes))}, not {problem.dtype}"
    if problem.head_dim != problem.value_dim:
        return f"it needs values as wide as keys, they are {problem.value_dim} and {problem.head_dim}"
    if problem.head_dim % 8:
        return f"it needs a head dim that is a multiple of 8, not {problem.head_dim}"
    return None


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, S, H, D] → [B, H, S, D], of dense rows."""
    return [dense_rows(tensor).transpose(1, 2) for tensor in tensors]


def _whole_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped heads written out, for kernels that do not group: [B, S_kv, H_kv, D] → [B, S_kv, H, D]."""
    return (k, v) if k.size(2) == q.size(2) else (expand_heads(k, q.size(2)), expand_heads(v, q.size(2)))


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A key mask as the bias [B, H, S_q, S_kv] that the kernels add, one row in memory a sample.

    They read it in runs of 16 bytes: rows are as long as a multiple of 16 elements, and cut to size.
    """
    if mask is None:
        return None
    # The kernel reads the bias in rows that are aligned to 16 elements: a view of a wider tensor is.
    size, padded = mask.size(1), -(-mask.size(1) // 16) * 16
    bias = q.new_zeros(mask.size(0), padded)
    bias[:, :size] = key_bias(mask, q.dtype)
    return bias[:, None, None, :size].expand(q.size(0), q.size(2), q.size(1), size)


def unused_seed(q: Tensor) -> Tensor:
    """The state [2] of a dropout that is not used, on the device of q."""
    return torch.empty(2, dtype=torch.uint64, device=q.device)


class _AtenKernel:
    """What torch's three kernels share: heads before tokens, grouped heads written out, a key mask as a bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        # Gradients of grouped heads are summed afterwards, because these kernels know one key head a query head.
        inputs = _heads_first(q, *_whole_heads(q, k, v))
        out, lse = self._forward(inputs, _bias(scores.mask, q), scores)
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        num_kv_heads = k.size(2)
        inputs = _heads_first(grad, q, *_whole_heads(q, k, v), out)
        # Flash and cuDNN read log-sum-exps through their pointer. Those of some rows lie scattered among those of all,
        # and a kernel that just reads on gets other rows' values.
        grads = self._backward(inputs, lse.contiguous(), _bias(scores.mask, q), scores)
        grad_q, grad_k, grad_v = _heads_first(*grads)
        return grad_q, sum_groups(grad_k, num_kv_heads), sum_groups(grad_v, num_kv_heads)

    def _forward(
        self, inputs: Sequence[Tensor], bias: Tensor | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """q, k, v [B, H, S, D] → output and log-sum-exp [B, H, S_q]."""
        raise NotImplementedError

    def _backward(
        self, inputs: Sequence[Tensor], lse: Tensor, bias: Tensor | None, scores: Scores
    ) -> Sequence[Tensor]:
        """The output's gradient, q, k, v, the output [B, H, S, D], lse [B, H, S_q] → gradients of q, k, v."""
        raise NotImplementedError


class FlashKernel(_AtenKernel):
    """`aten::_scaled_dot_product_flash_attention`."""

    name = "aten flash"

    def refuses(self, problem: Problem) -> str | None:
        unfit = _refuses_on_any(problem, _HALF)
        if unfit is None and torch.cuda.get_device_capability(problem.device) < (8, 0):
            return "it needs an Ampere GPU or a newer one"
        if unfit is None and problem.masked:
            return "it takes no key mask"
        if unfit is None and problem.head_dim > 256:
            return f"it needs a head dim of at most 256, not {problem.head_dim}"
        return unfit

    def _forward(
        self, inputs: Sequence[Tensor], bias: Tensor | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        q, k, v = inputs
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, scores.causal, scale=scores.scale
        )
        return out, lse

    def _backward(
        self, inputs: Sequence[Tensor], lse: Tensor, bias: Tensor | None, scores: Scores
    ) -> Sequence[Tensor]:
        grad, q, k, v, out = inputs
        seed = unused_seed(q)
        # The two None are cumulative lengths, which only samples packed into one row have.
        grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, scores.causal, seed, seed),
            scale=scores.scale,
        )
        return grads


class CudnnKernel(_AtenKernel):
    """`aten::_scaled_dot_product_cudnn_attention`, for Hopper and newer."""

    name = "cuDNN"

    def refuses(self, problem: Problem) -> str | None:
        unfit = _refuses_on_any(problem, _HALF)
        if unfit is None and torch.version.hip:
            return "it is NVIDIA's"
        version = torch.backends.cudnn.version() or 0
        if unfit is None and version <= 91500:
            # pytorch/pytorch #169849: its backward leaves the tensors' memory where 128 does not divide the queries.
            number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
            return f"version {number} of cuDNN has a faulty backward; 9.15.1 and newer have not"
        if unfit is None and problem.deterministic:
            return "its backward is not deterministic"
        if unfit is None and problem.head_dim > 128:
            return f"its backward needs a head dim of at most 128, not {problem.head_dim}"
        if unfit is None and problem.single:
            return "it needs more than one query and one key"
        if unfit is None and torch.cuda.get_device_capability(problem.device) < (9, 0):
            return "it is slower than the others before Hopper"
        return unfit

    def _forward(
        self, inputs: Sequence[Tensor], bias: Tensor | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """As in the base class; cuDNN's own log-sum-exp is [B, H, S_q, 1]."""
        q, k, v = inputs
        # True asks for the log-sum-exp, by which blocks are merged.
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, 0.0, scores.causal, scale=scores.scale
        )
        return out, lse.reshape(out.shape[:3])

    def _backward(
        self, inputs: Sequence[Tensor], lse: Tensor, bias: Tensor | None, scores: Scores
    ) -> Sequence[Tensor]:
        """As in the base class; cuDNN takes the log-sum-exp as [B, H, S_q, 1]."""
        grad, q, k, v, out = inputs
        # The two None are cumulative lengths, as for flash; `sizes` are the longest rows of queries and of keys.
        seed, sizes = unused_seed(q), (q.size(2), k.size(2))
        grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(
                grad,
                q,
                k,
                v,
                out,
                lse.unsqueeze(-1),
                seed,
                seed,
                bias,
                None,
                None,
                *sizes,
                0.0,
                scores.causal,
            ),
            scale=scores.scale,
        )
        return grads


class EfficientKernel(_AtenKernel):
    """`aten::_scaled_dot_product_efficient_attention`: key masks and fp32.

    Under `torch.use_deterministic_algorithms(True)` its backward does not split keys, and is deterministic.
    """

    name = "aten efficient"

    def refuses(self, problem: Problem) -> str | None:
        return _refuses_on_any(problem, (torch.float32, *_HALF))

    def _forward(
        self, inputs: Sequence[Tensor], bias: Tensor | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """As in the base class; rows that the kernel pads its log-sum-exp with are cut off: [B, H, S_q]."""
        q, k, v = inputs
        # True asks for the log-sum-exp here too.
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, scores.causal, scale=scores.scale
        )
        return out, lse[:, :, : q.size(2)]

    def _backward(
        self, inputs: Sequence[Tensor], lse: Tensor, bias: Tensor | None, scores: Scores
    ) -> Sequence[Tensor]:
        """As in the base class; lse: [B, H, S_q], padded here as the kernel wants it."""
        grad, q, k, v, out = inputs
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        # The kernel wants its log-sum-exps in multiples of 32 rows; those beyond the end weigh nothing.
        missing = -lse.size(2) % 32
        lse = F.pad(lse, (0, missing), value=float("inf")) if missing else lse
        # Gradients of q, k and v are wanted, and none of the bias, which only hides keys.
        *grads, _of_bias = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, k, v, bias, out, lse, seed, seed, 0.0),
            [True, True, True, False],
            scores.causal,
            scale=scores.scale,
        )
        return grads
