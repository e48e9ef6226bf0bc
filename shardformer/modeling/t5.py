"""T5's layer norm in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class T5LayerNorm(nn.Module):
    """x / rms(x) · weight, in T5's order: the statistics in fp32, the product in the weight's dtype.

    Source: T5 (arXiv:1910.10683) as published with Mesh TensorFlow. `F.rms_norm` multiplies the weight in fp32
    instead, which changes a quarter of bf16 outputs in the last bit.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden_size] in and out; a bf16 or fp16 weight decides the output's dtype."""
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        variance = wide.square().mean(-1, keepdim=True)
        normalized = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            normalized = normalized.to(self.weight.dtype)
        return self.weight * normalized

    @staticmethod
    def from_native_module(module: nn.Module, *args: object, **kwargs: object) -> T5LayerNorm:
        """The same norm on the same parameter object, from apex's FusedRMSNorm, torch's RMSNorm or another T5's.

        Further arguments (a process group, say) are what ColossalAI passes to every replacement; none is needed.

        Raises:
            ValueError: the module is not an RMSNorm over its last dimension with a weight.
        """
        weight = getattr(module, "weight", None)
        has_bias = getattr(module, "bias", None) is not None
        if (
            not isinstance(weight, Tensor)
            or weight.dim() != 1
            or has_bias
            or isinstance(module, nn.LayerNorm)
        ):
            raise ValueError(
                f"T5LayerNorm replaces an RMSNorm with one weight vector and no bias; {type(module).__name__} "
                "is none: leave it out of the policy"
            )
        name = next((name for name in ("variance_epsilon", "eps") if hasattr(module, name)), "")
        if not name:
            raise ValueError(
                f"T5LayerNorm finds no eps on this {type(module).__name__}, neither `eps` nor `variance_epsilon`; make "
                "a T5LayerNorm with its eps, and set its weight"
            )
        eps: float | None = getattr(module, name)
        if eps is None:  # torch.nn.RMSNorm(eps=None): of the dtype it computes in
            eps = torch.finfo(torch.float64 if weight.dtype == torch.float64 else torch.float32).eps
        norm = T5LayerNorm(0, eps=float(eps))
        norm.weight = weight  # type: ignore[assignment]
        norm.train(module.training)
        return norm


# The classes of transformers, of apex, which transformers takes where it is installed, and of torch.
_NAMES = ("FusedRMSNorm", "MixedFusedRMSNorm", "T5LayerNorm", "UMT5LayerNorm", "RMSNorm")


def replace_t5_norms(model: nn.Module, names: tuple[str, ...] = _NAMES) -> Callable[[], None]:
    """Puts a `T5LayerNorm` in the place of every norm of these class names; returns what puts the norms back.

    Raises:
        ValueError: the model has none of them, or one that a T5LayerNorm cannot replace. Then it is as it was.
    """
    # Every module with its parent and its name there, because a norm is replaced in its parent.
    held = [(parent, *each) for parent in model.modules() for each in parent.named_children()]
    named = [each for each in held if type(each[2]).__name__ in names]
    if not named:
        raise ValueError(
            f"the policy swaps norms called {', '.join(names)}, but {type(model).__name__} has none"
        )
    replaced = [each for each in named if type(each[2]) is not T5LayerNorm]
    # All are made before any is set: one that cannot be replaced leaves the model as it was.
    made = [T5LayerNorm.from_native_module(norm) for _parent, _name, norm in replaced]
    for (parent, name, _norm), new in zip(replaced, made, strict=True):
        setattr(parent, name, new)

    def restore() -> None:
        for (parent, name, norm), new in zip(replaced, made, strict=True):
            norm.weight = new.weight  # another one, where a checkpoint was assigned or meta left since
            setattr(parent, name, norm)

    return restore
