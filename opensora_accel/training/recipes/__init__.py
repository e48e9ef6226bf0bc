"""Recipes: how each family's model is called for a batch, and what it answers; a table each (`base`)."""

from __future__ import annotations

from opensora_accel.training.recipes import (
    allegro,
    cogvideox,
    cosmos,
    easyanimate,
    hunyuan_video,
    hunyuan_video15,
    kandinsky5,
    latte,
    ltx,
    ltx2,
    minimax_h3,
    mochi,
    open_sora,
    sana_video,
    wan,
)
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes, patches_of
from opensora_accel.training.recipes.checks import check_conditioning, check_recipe, check_rows

__all__ = [
    "RECIPES",
    "Inputs",
    "Recipe",
    "Sizes",
    "check_conditioning",
    "check_recipe",
    "check_rows",
    "patches_of",
]

# By the class of the model.
RECIPES: dict[str, Recipe] = {
    name: recipe
    for recipe in (
        wan.RECIPE,
        wan.LIKE_WAN,
        wan.VACE,
        wan.SKYREELS_V2,
        open_sora.MMDIT,
        open_sora.STDIT3,
        *(
            module.RECIPE
            for module in (
                allegro,
                latte,
                ltx,
                ltx2,
                minimax_h3,
                mochi,
                cogvideox,
                cosmos,
                easyanimate,
                hunyuan_video,
                hunyuan_video15,
                kandinsky5,
                sana_video,
            )
        ),
    )
    for name in recipe.models
}
