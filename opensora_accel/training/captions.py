"""What the model sees of a caption: states of one frozen encoder, or of two. `TextStates` says which, for each family.

HunyuanVideo asks a language model to describe a video, and takes what that thinks of the caption, two layers before its
end; and what CLIP makes of the caption as a whole:

    "…Describe the video by…: user: a rabbit yawns" → 95 + 7 tokens → states of the last 7, [7, 4096]
    "a rabbit yawns"                                → 5 tokens      → one state, [1, 768]

MiniMax H3 reads the frames that are given too, and references so. Of a clip of 768 × 1,344 pixels whose first frame is
given:

    "<Picture 1>: " + a mark, 24 · 42 tokens of the frame, a mark + "a rabbit yawns"
        → 6 + 1010 + 5 tokens → their states, [1021, 5120], of which 1010 count as rows of a clip

HunyuanVideo from a first frame has it in the template (`llava`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

# What the standard deviation of a layer's state is raised by, where all are taken.
_LEAST_DEVIATION = 1e-8
# Captions, and words, that are looked at.
_TOLD_APART = 1000
# What stands around a frame, and for each of its parts, in what Qwen's models read.
VISION_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@dataclass(frozen=True)
class InTemplate:
    """How an encoder sees the first frame of a clip, which stands in its template."""

    # The token that stands for it there.
    token: str
    # Of its states, before those of the caption, every so manieth is taken; and of the black one of an empty caption.
    step: int
    step_of_empty: int
    # The token that ends the mark of who speaks; of the last such mark, so many tokens, no states are taken.
    end_of_mark: str = ""
    mark_length: int = 0


@dataclass(frozen=True)
class TextStates:
    """Which states of which encoder a family takes of a caption."""

    # Types of models, as transformers names them; each does.
    encoders: tuple[str, ...] = ("t5", "umt5")
    # What the encoder reads, with the caption in place of {}.
    template: str = "{}"
    # What the encoder reads of a caption, in the template; None where it reads nothing of it.
    reads: Callable[[str], str | None] | None = None
    # An empty caption is read without the template.
    is_empty_alone: bool = False
    # Tokens of the template before the caption, of which no states are taken; None is all but the last.
    skipped: int | None = 0
    # The state of the first of them is taken all the same.
    keeps_first: bool = False
    # The layer whose output is taken, −2 the last but one; or those of all, side by side, each with mean 0 and standard
    # deviation 1; None is what the encoder gives, behind its last norm.
    layer: int | Literal["all"] | None = None
    # One state for the whole caption, in place of one for each token.
    pooled: bool = False
    # Tokens of a caption; None is `text.length`.
    length: int | None = None
    # The encoder leaves padding out of its attention.
    masked: bool = True
    # Tokens to which its pipeline pads every caption, where the model sees padding; None is any number.
    padded_to: int | None = None
    # What it gives for padding becomes zero; or it stays, and the model sees it; or sees as much of it, in place of a
    # caption that is left out, as the caption has states.
    padding: Literal["zeroed", "kept", "as the caption"] = "zeroed"
    # Where padding stands.
    padding_side: Literal["right", "left"] = "right"
    # The tokenizer adds those that it has for a beginning and an end.
    special_tokens: bool = True
    # Classes of diffusers, any of which makes two kinds of states, here side by side, of what all layers give: for
    # clips and for sound. It lies in `text.path_2`. Padding becomes states that it has learned, which the model sees.
    connectors: tuple[str, ...] = ()
    # What is read before each frame that is given, with its number in place of {}, of an encoder that sees frames among
    # its tokens; the caption follows as it is. Or how it sees the first one in the template. Empty where it sees none.
    picture: str | InTemplate = ""

    @property
    def sees_padding(self) -> bool:
        """Whether the model sees as many states of every caption."""
        return self.padding == "kept" or bool(self.connectors)

    @property
    def of_small_encoder(self) -> TextStates:
        """Those of an encoder that is drawn: it has learned no template."""
        template, skipped, picture = "{}", 0, self.picture
        if isinstance(picture, InTemplate):
            template, skipped = picture.token + template, 1
            picture = dataclasses.replace(picture, end_of_mark="", mark_length=0)
        return dataclasses.replace(
            self,
            encoders=("t5",),
            template=template,
            skipped=skipped,
            keeps_first=False,
            layer=None,
            special_tokens=True,
            picture=picture,
        )

    def text_of(self, caption: str) -> str | None:
        """What the encoder is given for a caption."""
        read = caption if self.reads is None else self.reads(caption)
        if read is None or (self.is_empty_alone and not read):
            return read
        return self.template.format(read)


class TextShape(NamedTuple):
    """How many states a caption has, with padding, and how wide they are."""

    length: int
    width: int


class TextEncoder:
    """A frozen encoder and its tokenizer. Nothing is fetched.

    Args:
        taken: which states the model takes.
        num_tokens: to which captions are cut and padded, without what `taken.skipped` counts.
        option: that names it, for messages.
        connectors: what `taken.connectors` names; without it a small encoder's states stand for both kinds.
        processor: prepares frames for an encoder that sees them; None reads captions alone.
    """

    def __init__(
        self,
        tokenizer: Any,
        model: Any,
        num_tokens: int,
        taken: TextStates = TextStates(),
        option: str = "text.path",
        connectors: Any = None,
        processor: Any = None,
    ):
        self.processor = processor
        self.connectors = None if connectors is None else connectors.eval().requires_grad_(False)
        self.tokenizer, self.taken, self.option = tokenizer, taken, option
        self.model = model.eval().requires_grad_(False)
        # The part that reads, of one that sees too.
        self._reader = self.model if processor is None else self.model.language_model
        self._length, skipped = num_tokens, taken.skipped
        if skipped is None:
            # Of which the last may have grown together with a caption's first.
            skipped = len(tokenizer(taken.template.partition("{}")[0])["input_ids"]) - 1
        # Which states are left out: those from the first, or the second, up to this one.
        self._skipped = range(int(taken.keeps_first), skipped)

    @property
    def shape(self) -> TextShape:
        width = width_of(self._reader.config, self.taken)
        if self.connectors is not None:
            width = width_of_connectors(self.connectors.config)
        elif self.taken.connectors:
            width *= 2
        return TextShape(1 if self.taken.pooled else self._length, width)

    def skipped(self, caption: str) -> range:
        """The tokens of which no states are taken."""
        return range(0) if self.taken.is_empty_alone and not self.taken.text_of(caption) else self._skipped

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, and what its embeddings have without loss."""
        return self.model.dtype

    def tokens(self, caption: str, frames: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """What the model is given for a caption: ids [1, L] and a mask [1, L] that is 0 behind its end.

        Both are 0 where it reads nothing of the caption. Behind frames, uint8 [H, W, 3] each, a caption is not padded.
        """
        if frames is not None and len(frames):
            (ids,) = self.tokenizer([caption], **self._cut(self._length))["input_ids"]
            read = torch.tensor([[*self._before(frames)[0], *ids]])
            return read, torch.ones_like(read)
        text = self.taken.text_of(caption)
        num_tokens = len(self.skipped(caption)) + self._length
        if text is None:
            nothing = torch.zeros(1, num_tokens, dtype=torch.int64)
            return nothing, nothing
        tokens = self.tokenizer(
            [text],
            padding="max_length",
            # Some tokenizers are saved with the other side, for a model that is to go on writing.
            padding_side=self.taken.padding_side,
            return_tensors="pt",
            **self._cut(num_tokens),
        )
        return tokens["input_ids"], tokens["attention_mask"]

    def _cut(self, length: int) -> dict[str, Any]:
        """How the tokenizer cuts what it reads."""
        return {"truncation": True, "max_length": length, "add_special_tokens": self.taken.special_tokens}

    def _before(self, frames: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
        """Ids of what is read before a caption, of frames [H, W, 3], and which of them are a frame's."""
        assert isinstance(self.taken.picture, str)
        start, pad, end = self.tokenizer.convert_tokens_to_ids(VISION_TOKENS)
        ids, are_seen = [], []
        for number, frame in enumerate(frames, start=1):
            of_frame = [start, *[pad] * num_picture_tokens(self.processor, *frame.shape[:2]), end]
            label = self.tokenizer(self.taken.picture.format(number), add_special_tokens=False)["input_ids"]
            ids += [*label, *of_frame]
            are_seen += [False] * len(label) + [True] * len(of_frame)
        return ids, are_seen

    def shown(self, caption: str, frames: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        """Of the frames of a clip with this caption, uint8 [H, W, 3] each, what the encoder sees."""
        return frames

    def are_seen(self, frames: Sequence[Sequence[Tensor]]) -> list[list[bool]]:
        """Which of the states before each caption are those of its frames, uint8 [H, W, 3]; none without frames."""
        return [self._before(each)[1] if len(each) else [] for each in frames]

    @torch.no_grad()
    def encode(
        self,
        captions: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        frames: Sequence[Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """Embeddings [B, length, width] of B captions; zero behind the end of a caption, unless padding is kept.

        Args:
            frames: those that are read before each caption, uint8 [H, W, 3] each, as many as it has; with them the
                longest says the length.
        """
        # One by one, so that the values do not depend on which captions come together.
        if frames is None:
            return torch.cat([self._encode(caption, device, dtype) for caption in captions])
        states = [
            self._see(caption, each, device, dtype) if len(each) else self._encode(caption, device, dtype)[0]
            for caption, each in zip(captions, frames, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(states, batch_first=True)

    def _see(
        self, caption: str, frames: Sequence[Tensor], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """[L, width] of frames, uint8 [H, W, 3] each, and the caption behind them."""
        ids, mask = (each.to(device) for each in self.tokens(caption, frames))
        seen = self.processor(images=[each.cpu().numpy() for each in frames], return_tensors="pt")
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            mm_token_type_ids=(ids == self.model.config.image_token_id).long(),
            pixel_values=seen["pixel_values"].to(device, self.dtype),
            image_grid_thw=seen["image_grid_thw"].to(device),
            output_hidden_states=True,
        )
        return states_of(output, self.taken.layer)[0].to(dtype)

    def _encode(self, caption: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[1, length, width]."""
        taken = self.taken
        if taken.text_of(caption) is None:
            return torch.zeros(1, *self.shape, dtype=dtype, device=device)
        ids, mask = self.tokens(caption)
        if not mask.any() and self.connectors is None:
            # A tokenizer may make nothing of it.
            return torch.zeros(1, *self.shape, dtype=dtype, device=device)
        ids, mask = ids.to(device), mask.to(device)
        seen = mask if taken.masked else None
        is_inner = taken.layer is not None or self.connectors is not None
        output = self._reader(input_ids=ids, attention_mask=seen, output_hidden_states=is_inner)
        if self.connectors is not None:
            # [1, length, width · layers]
            states = torch.stack(output.hidden_states, dim=-1).flatten(2)
            of_clips, of_sound, _ = self.connectors(states, mask, padding_side=taken.padding_side)
            return torch.cat([of_clips, of_sound], dim=-1).to(dtype)
        if taken.pooled:
            pooled = output.get("pooler_output")
            # T5 has none; what it makes of the mark at the end of a caption stands for it.
            state = output.last_hidden_state[:, int(mask.sum()) - 1] if pooled is None else pooled
            return state.unsqueeze(1).to(dtype)
        states = states_of(output, taken.layer)
        skipped = self.skipped(caption)
        states, mask = (
            torch.cat([each[:, : skipped.start], each[:, skipped.stop :]], dim=1) if skipped else each
            for each in (states.to(dtype), mask)
        )
        states = states * mask.unsqueeze(-1).to(dtype) if taken.padding == "zeroed" else states
        return torch.cat([states, states], dim=-1) if taken.connectors else states

    def num_tokens(
        self, captions: Sequence[str], frames: Sequence[Sequence[Tensor]] | None = None
    ) -> list[int]:
        """How many states of each caption the model may see: of its own tokens, or, where padding is seen, all.

        Args:
            frames: those that are read before each caption, as `encode` takes them.
        """
        if frames is not None:
            return [
                self.tokens(caption, each)[0].size(1) if len(each) else self.num_tokens([caption])[0]
                for caption, each in zip(captions, frames, strict=True)
            ]
        if self.taken.pooled or self.taken.sees_padding:
            return [self.shape.length] * len(captions)
        found = [
            max(0, len(ids) - len(self.skipped(caption)))
            for ids, caption in zip(self._ids(captions), captions, strict=True)
        ]
        if self.taken.padding != "as the caption":
            return found
        return [own if caption else self.shape.length for own, caption in zip(found, captions, strict=True)]

    def _ids(self, captions: Sequence[str]) -> list[list[int]]:
        """Of each caption in its template, cut and not padded; none where nothing of it is read."""
        texts = [self.taken.text_of(caption) for caption in captions]
        found: list[list[int]] = [[] for _ in captions]
        ends = [len(self.skipped(caption)) + self._length for caption in captions]
        for end in set(ends):
            read = {row: text for row, text in enumerate(texts) if text is not None and ends[row] == end}
            if read:
                tokens = self.tokenizer([*read.values()], **self._cut(end))["input_ids"]
                for row, ids in zip(read, tokens, strict=True):
                    found[row] = ids
        return found

    def check(self, captions: Iterable[str]) -> None:
        """Checks that the captions say something to the model.

        Raises:
            ValueError: different words, or different captions, all become the same tokens, or tokens that the encoder
                does not have; or the tokenizer makes too few of the template, or the template leaves no room.
        """
        of_template = len(
            self.tokenizer(self.taken.template.format(""), add_special_tokens=self.taken.special_tokens)[
                "input_ids"
            ]
        )
        if self.taken.skipped and of_template <= self.taken.skipped:
            raise ValueError(
                f"the tokenizer of {self.option} is of another encoder: it makes {of_template} tokens of a "
                f"template that has more than {self.taken.skipped}; give a --{self.option} whose tokenizer and encoder "
                "belong together"
            )
        in_states = of_template - len(self._skipped)
        if self.taken.length is None and in_states >= self._length:
            raise ValueError(
                f"text.length ({self._length}) leaves no room for captions: {in_states} tokens are those of the "
                "template that they are read in; set it higher"
            )
        if self.processor is not None:
            picture = self.taken.picture
            name = picture.token if isinstance(picture, InTemplate) else VISION_TOKENS[1]
            own, known = self.tokenizer.convert_tokens_to_ids(name), self.model.config.image_token_id
            if own != known:
                raise ValueError(
                    f"the tokenizer of {self.option} is of another encoder: a frame's token {name} is its {own}, and "
                    f"the encoder's {known}; give a --{self.option} whose tokenizer and encoder belong together"
                )
        different = sorted({caption for caption in captions if caption.strip()})[:_TOLD_APART]
        words = sorted({word for caption in different for word in caption.split()})[:_TOLD_APART]
        if not words:
            return
        of_words = self.tokenizer(words)["input_ids"]
        largest, size = max(max(ids, default=0) for ids in of_words), self._reader.config.vocab_size
        if largest >= size:
            raise ValueError(
                f"the tokenizer is of another encoder: it gives token {largest} where the encoder has {size}; "
                f"give a --{self.option} whose tokenizer and encoder belong together"
            )
        # One token is left of any word where there is a mark for its beginning; the rest is <unk>, and special.
        known = {token for ids in of_words for token in ids} - set(self.tokenizer.all_special_ids)
        if len(words) > 1 and len(known) <= 1:
            raise ValueError(
                f"the tokenizer knows none of the {len(words)} words in the captions: {words[-1]!r} becomes "
                f"{self.tokenizer.convert_ids_to_tokens(of_words[-1])}, and the others the like; give a "
                f"--{self.option} with the whole tokenizer"
            )
        # What is told apart may lie behind the cut of one encoder, where the other has more.
        if (
            self.taken.length is None
            and len(different) > 1
            and len(set(map(tuple, self._ids(different)))) == 1
        ):
            raise ValueError(
                f"all captions are the same in their first {self.shape.length} tokens, and longer ones are cut there; "
                "raise --text.length, or let the captions begin with what tells them apart"
            )


def num_picture_tokens(processor: Any, height: int, width: int) -> int:
    """How many tokens an encoder has of a frame of this size."""
    return int(processor.get_number_of_image_patches(height, width, {})) // processor.merge_size**2


def width_of(config: Any, taken: TextStates) -> int:
    """How wide the states are that are taken of an encoder, by its configuration."""
    width = int(config.d_model if hasattr(config, "d_model") else config.hidden_size)
    return width * int(config.num_hidden_layers) if taken.layer == "all" else width


def states_of(output: Any, layer: int | Literal["all"] | None) -> Tensor:
    """[1, L, width] of what an encoder gives."""
    if layer is None:
        states: Tensor = output.last_hidden_state
    elif layer == "all":
        # [1, L, layers, width], without what goes into the first layer.
        states = torch.stack(output.hidden_states[1:], dim=2)
        states = (states - states.mean(-1, keepdim=True)) / (states.std(-1, keepdim=True) + _LEAST_DEVIATION)
        states = states.flatten(2)
    else:
        states = output.hidden_states[layer]
    return states


def width_of_connectors(config: Any) -> int:
    """How wide states for clips and for sound are, side by side."""
    sizes = (
        config[f"{stream}_connector_num_attention_heads"] * config[f"{stream}_connector_attention_head_dim"]
        for stream in ("video", "audio")
    )
    return int(sum(sizes))
