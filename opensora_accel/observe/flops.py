"""Floating-point operations of a step on this rank, counted while it runs by torch's own formulas for its operators.

    model FLOPs       what the model needs: forward and backward, every product of matrices once
    hardware FLOPs    what was computed: those and what checkpoints recompute

A product of [m, k] and [k, n] is 2·m·k·n. Attention of S queries and T keys is two such products a head forward and
five backward, whether a mask hides some or not; of slices of a mask only their area counts. Utilisation is model (MFU)
or hardware (HFU) FLOPs of a step, divided by its seconds and by the peak of the device (PaLM, arXiv:2204.02311,
appendix B).

torch's FlopCounterMode is not used, because it takes operators apart: a step under it is not the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from opensora_accel.attention import slices
from opensora_accel.observe.modes import OperatorMode
from opensora_accel.observe.operators import arguments_of


class FlopCounter(OperatorMode):
    """Within it, the products of this thread's operators are counted, apart where `recomputing`."""

    def __init__(self) -> None:
        super().__init__()
        _know_all_operators()
        self.model_flops = self.hardware_flops = 0
        self._is_recomputing = False

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Adds what its formula says."""
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=outputs)
            self.hardware_flops += flops
            self.model_flops += 0 if self._is_recomputing else flops

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around what a checkpoint recomputes."""
        self._is_recomputing = True
        try:
            yield
        finally:
            self._is_recomputing = False


@lru_cache(maxsize=1)
def _know_all_operators() -> None:
    """Formulas for the operators of this package, and for the flash kernel for CPUs, which has none (torch 2.13)."""
    ours, aten = torch.ops.opensora_accel, torch.ops.aten
    if aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry:

        @register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu)
        def _(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
            return int(sdpa_flop_count(q, k, v))

        @register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu_backward)
        def _(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
            return int(sdpa_backward_flop_count(grad, q, k, v))

    def heads_first(shape: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        return shape[0], shape[2], num_tokens, shape[3]

    def forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], num_keys: int) -> int:
        """[B, S, H, D] of this rank's queries; keys are counted for as many heads as there are of queries."""
        of_k, of_v = ((*q[:2], q[2], each[3]) for each in (k, v))
        return int(
            sdpa_flop_count(heads_first(q, q[1]), heads_first(of_k, num_keys), heads_first(of_v, num_keys))
        )

    def backward(
        grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], num_keys: int
    ) -> int:
        of_k, of_v = ((*q[:2], q[2], each[3]) for each in (k, v))
        shapes = heads_first(q, q[1]), heads_first(of_k, num_keys), heads_first(of_v, num_keys)
        return int(sdpa_backward_flop_count(heads_first(grad, q[1]), *shapes))

    @register_flop_formula(ours.ring_attention)
    def _(q: Any, k: Any, v: Any, _mask: Any, _splits: Any, kv_splits: Any, *_: Any, **__: Any) -> int:
        return forward(q, k, v, sum(kv_splits))

    @register_flop_formula(ours.ring_attention_backward)
    def _(grad: Any, q: Any, k: Any, v: Any, *others: Any, **_: Any) -> int:
        _mask, _out, _lse, _splits, kv_splits, *_options = others
        return backward(grad, q, k, v, sum(kv_splits))

    _know_slices()

    @register_flop_formula(ours.masked_attention)
    def _(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return forward(q, k, v, k[1])

    @register_flop_formula(ours.masked_attention_backward)
    def _(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return backward(grad, q, k, v, k[1])


class SharedAttention(NamedTuple):
    """Attention by slices: which rank has what of it, and the place of this one among them."""

    deal: slices.Deal
    place: int

    @classmethod
    def by(cls, deal_name: str, group: str) -> SharedAttention:
        """Of the names that an operator is called with; of a rank that has all tokens the group is ""."""
        place = _resolve_process_group(group).rank() if group else 0  # type: ignore[arg-type]
        return cls(slices.dealt(deal_name), place)

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SharedAttention | None:
        """What an operator is about; None where it is another, or cross-attention, whose keys all ranks have."""
        if func._schema.name != "opensora_accel::sliced_attention":
            return None
        values = arguments_of(func, args, kwargs)
        found = cls.by(values["deal"], values["group"])
        return found if found.deal.mask.num_queries == found.deal.mask.num_keys else None

    @property
    def num_pairs(self) -> int:
        """Of queries and keys, that this rank computes."""
        return self.deal.areas[self.place]

    @property
    def imbalance_in_order(self) -> float:
        """The largest share over the mean, if each rank had a run of the tokens, as many as it has."""
        splits = self.deal.splits
        return slices.Deal.in_order(self.deal.mask, splits, splits).imbalance


def _know_slices() -> None:
    """Formulas for attention by slices, whose pairs a deal counts."""
    ours = torch.ops.opensora_accel

    @register_flop_formula(ours.sliced_attention)
    def _(q: Any, _k: Any, v: Any, _mask: Any, deal: str, group: str, *_: Any, **__: Any) -> int:
        return int(2 * q[0] * q[2] * SharedAttention.by(deal, group).num_pairs * (q[3] + v[3]))

    @register_flop_formula(ours.sliced_attention_backward)
    def _(_grad: Any, q: Any, _k: Any, v: Any, *others: Any, **_: Any) -> int:
        _mask, _out, _lse, deal, group, _scale = others
        # The scores again, dq and dk, which are as wide as keys; dv and the gradient of the weights, as values.
        return int(2 * q[0] * q[2] * SharedAttention.by(deal, group).num_pairs * (3 * q[3] + 2 * v[3]))
