"""Captions of an encoder that sees a clip's first frame in its template, LLaVA's: HunyuanVideo from a first frame.

LLaVA is a language model that is given a picture as states of CLIP in the place of a token, "<image>". HunyuanVideo
asks it to describe a video by the picture and the caption, and takes what it thinks two layers before its end: every
fourth state of the picture, and those of the caption. The mark of who speaks next, which the template ends with, says
nothing of the caption, and has no states. With a caption of 9 tokens:

    read     5 tokens, 576 of the picture, 97 of the template, 9 of the caption, 4 of the mark, 1 behind it
    taken              144 = 576 / 4,                          9,                               1          → [154, 4096]

An empty caption stands for one that is left out, and goes with a black picture, as the pipeline gives a negative prompt
one. Of that it takes every second state, 288, whatever it takes of others.

Source: diffusers, HunyuanVideoImageToVideoPipeline
(https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/hunyuan_video).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.training.captions import InTemplate, TextEncoder, states_of

# What stands in the place of a frame that is left out has the encoder's size afterwards, whatever its own.
_ANY_SIDE = 16


class LlavaEncoder(TextEncoder):
    """A frozen encoder that sees the first frame of a clip in its template, and its tokenizer."""

    @property
    def _picture(self) -> InTemplate:
        picture = self.taken.picture
        assert isinstance(picture, InTemplate)
        return picture

    def shown(self, caption: str, frames: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """uint8 [H, W, 3], the first frame alone; black for an empty caption, and where there is no frame."""
        if frames is None or not len(frames):
            return [torch.zeros(_ANY_SIDE, _ANY_SIDE, 3, dtype=torch.uint8)]
        return [frames[0] if caption else torch.zeros_like(frames[0])]

    def tokens(self, caption: str, frames: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """What the model is given for a caption in the template: ids [1, L], with those of the picture, and ones."""
        ids = self._read(caption)
        place = ids.index(self.model.config.image_token_id)
        of_picture = ids[place : place + 1] * picture_states(self.model.config)
        read = torch.tensor([[*ids[:place], *of_picture, *ids[place + 1 :]]])
        return read, torch.ones_like(read)

    def _read(self, caption: str) -> list[int]:
        """Ids of the template with a caption; a long caption is cut, and with it what stands behind."""
        text = self.taken.text_of(caption)
        length = len(self.skipped(caption)) + self._length
        (ids,) = self.tokenizer([text], **self._cut(length))["input_ids"]
        return list(ids)

    def _ends(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where the last mark of who speaks begins and ends among the ids of a caption and what stands behind it."""
        picture, end = self._picture, len(ids)
        if picture.end_of_mark:
            mark = self.tokenizer.convert_tokens_to_ids(picture.end_of_mark)
            # It is cut off with a long caption, of which as much is left out.
            end = max((number + 1 for number, each in enumerate(ids) if each == mark), default=end)
        return max(0, end - picture.mark_length), end

    def _step(self, caption: str) -> int:
        return self._picture.step if caption else self._picture.step_of_empty

    @torch.no_grad()
    def encode(
        self,
        captions: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        frames: Sequence[Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """Embeddings [B, L, width] of B captions and the first frames of their clips; zero behind the end of each.

        Args:
            frames: uint8 [H, W, 3] of frames of each clip, the first one first; without them all pictures are black.
        """
        shown: Sequence[Sequence[Tensor] | None] = [None] * len(captions) if frames is None else frames
        # One by one, so that the values do not depend on which captions come together.
        states = [
            self._see_in_template(caption, self.shown(caption, each), device, dtype)
            for caption, each in zip(captions, shown, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(states, batch_first=True)

    def _see_in_template(
        self, caption: str, frames: Sequence[Tensor], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """[L, width] of a picture, uint8 [H, W, 3], and of a caption."""
        ids, mask = (each.to(device) for each in self.tokens(caption))
        pictures = [each.cpu().numpy() for each in frames]
        pixels = self.processor(images=pictures, return_tensors="pt")["pixel_values"]
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            pixel_values=pixels.to(device, self.dtype),
            output_hidden_states=True,
        )
        states = states_of(output, self.taken.layer)[0].to(dtype)
        of_picture = states[ids[0] == self.model.config.image_token_id]
        # The picture is one of the tokens that are skipped.
        first = len(self.skipped(caption)) - 1 + len(of_picture)
        begin, end = (first + each for each in self._ends(ids[0, first:].tolist()))
        return torch.cat([of_picture[:: self._step(caption)], states[first:begin], states[end:]])

    def num_tokens(
        self, captions: Sequence[str], frames: Sequence[Sequence[Tensor]] | None = None
    ) -> list[int]:
        """How many states each caption has, with those of the picture."""
        counts = []
        for caption in captions:
            ids = self._read(caption)[len(self.skipped(caption)) :]
            begin, end = self._ends(ids)
            of_picture = -(-picture_states(self.model.config) // self._step(caption))
            counts.append(of_picture + len(ids) - (end - begin))
        return counts

    def check(self, captions: Iterable[str]) -> None:
        """As every encoder's; the tokenizer knows the mark of who speaks too, and no caption has one of these tokens.

        Raises:
            ValueError: as every encoder's, or it is not so.
        """
        captions = list(captions)
        super().check(captions)
        mark = self._picture.end_of_mark
        for token in filter(None, (self._picture.token, mark)):
            wrong = next((caption for caption in captions if token in caption), None)
            if wrong is not None:
                raise ValueError(
                    f"the caption {wrong!r} has {token} in it, which stands for something else in the template of "
                    f"{self.option}; leave it out of the caption"
                )
        if mark and self.tokenizer.convert_tokens_to_ids(mark) in (None, self.tokenizer.unk_token_id):
            raise ValueError(
                f"the tokenizer of {self.option} is of another encoder: it has no token {mark}; give a --{self.option} "
                "whose tokenizer and encoder belong together"
            )

    def are_seen(self, frames: Sequence[Sequence[Tensor]]) -> list[list[bool]]:
        """None: the model does not tell a picture's states from others."""
        return [[] for _ in frames]


def picture_states(config: Any) -> int:
    """How many states a LLaVA of this configuration has of a picture."""
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    # CLIP has a state for the whole picture too.
    return int(num_patches) + (config.vision_feature_select_strategy == "full")
