"""Whether a tensor is a DTensor, asked without loading torch's module of them, which takes as long as half of torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """False as well where nobody has loaded `torch.distributed.tensor`: then there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
