"""Open-Sora v1.2's STDiT3 (opensora/models/stdit/stdit3.py, its layers in opensora/models/layers/blocks.py)."""

from tests.opensora_models.stdit3.build import stdit3, stdit3_inputs
from tests.opensora_models.stdit3.model import STDiT3, STDiT3Block, STDiT3Config

__all__ = ["STDiT3", "STDiT3Block", "STDiT3Config", "stdit3", "stdit3_inputs"]
