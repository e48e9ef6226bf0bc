"""Stand-ins for Open-Sora's own transformers: its names, arguments and order of computation, at toy widths.

Policies find these models by such names, so a policy that fits here fits the released model. What differs:

- `auto_grad_checkpoint` comes from `opensora_accel.checkpoint`, where the original imports `opensora.acceleration`'s:
  the one line that a model written for Open-Sora changes.
- No sequence parallelism inside, no registry, no loading of weights; torch only.
- `F.scaled_dot_product_attention` in place of flash-attn and xformers, with a seam for the former.
- Every parameter that trains is random and not zero, so that no gradient is trivially zero.
"""

from tests.opensora_models.mmdit import MMDiTModel, mmdit, mmdit_inputs
from tests.opensora_models.stdit3 import STDiT3, stdit3, stdit3_inputs

__all__ = ["MMDiTModel", "STDiT3", "mmdit", "mmdit_inputs", "stdit3", "stdit3_inputs"]
