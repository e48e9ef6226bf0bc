"""A mask as a picture: queries downwards, keys to the right, darker where more of them see each other."""

from __future__ import annotations

import torch
from torch import Tensor

from opensora_accel.attention.slices.geometry import areas_of_corners

_SHADES = " ░▒▓█"


def draw(table: Tensor, num_queries: int, num_keys: int, width: int) -> str:
    """A picture of `width` characters, which are twice as high as wide.

    Args:
        table: [N, 6], a slice a row.
    """
    shares = _shares(table, num_queries, num_keys, width, -(-width * num_queries // max(2 * num_keys, 1)))
    # What is seen at all is not blank, and what is not seen whole is not black.
    last = len(_SHADES) - 1
    shades = (shares * last).round().clamp(max=last - 1).where(shares < 1, last)
    shades = shades.clamp(min=1).where(shares > 0, 0)
    return "\n".join("".join(_SHADES[int(shade)] for shade in row) for row in shades.tolist())


def save(path: str, table: Tensor, num_queries: int, num_keys: int, width: int) -> None:
    """Writes a PNG of `width` pixels; table: [N, 6].

    Raises:
        ModuleNotFoundError: Pillow is not installed.
    """
    from PIL import Image

    shares = _shares(table, num_queries, num_keys, width, -(-width * num_queries // max(num_keys, 1)))
    pixels = (255 * (1 - shares)).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)


def _shares(table: Tensor, num_queries: int, num_keys: int, width: int, height: int) -> Tensor:
    """[h, w]: the share of each cell's pairs that see each other; fewer cells where there are fewer queries or keys."""
    rows = _edges(num_queries, height)
    columns = _edges(num_keys, width)
    pairs = areas_of_corners(table, rows, columns).diff(dim=0).diff(dim=1)
    return pairs / (rows.diff()[:, None] * columns.diff()).clamp(min=1)


def _edges(size: int, most: int) -> Tensor:
    """[n + 1]: where n cells of nearly one size begin and end."""
    number = max(1, min(size, most))
    return torch.arange(number + 1) * size // number
