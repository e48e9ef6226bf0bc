"""Open-Sora v2's MMDiT (opensora/models/mmdit): the same three files, `math`, `layers` and `model`."""

from tests.opensora_models.mmdit.build import mmdit, mmdit_inputs
from tests.opensora_models.mmdit.math import flash_attention
from tests.opensora_models.mmdit.model import MMDiTConfig, MMDiTModel

__all__ = ["MMDiTConfig", "MMDiTModel", "flash_attention", "mmdit", "mmdit_inputs"]
