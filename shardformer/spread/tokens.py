"""How the tokens of the forward that is running are spread over the ranks.

A clip's length may change from call to call, so nothing about it is known when a model is sharded. Each forward finds
out anew. With P = 3 ranks, in a model that splits its input and its rotary table:

    forward begins       nothing is known
    7 tokens are split   splits = (3, 2, 2): this rank holds tokens 3 4, if it is rank 1
    the table is split   it has 7 rows, so it is cut alike; 9 rows would be an error
    attention            passes splits on, so that nothing is exchanged there
    forward ends         everything is forgotten

Backward may run parts of the forward again, after it has ended. A checkpoint therefore brings the state along, which
`Tokens.preserve` arranges.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.checkpoint import preserve_state
from opensora_accel.communications import (
    gather_forward_split_backward,
    share_sizes,
    split_forward_gather_backward,
)

if TYPE_CHECKING:
    from opensora_accel.attention import slices
    from shardformer.spread.streams import Packed

_running = threading.local()  # autograd recomputes on threads of its own
# A mark that a tensor keeps as long as it lives: a cache may hold it until a later forward.
_OWN = "_is_of_own_tokens"


def running_tokens() -> Tokens | None:
    """The tokens of the sharded forward that runs on this thread: the innermost, where one model calls another."""
    return getattr(_running, "tokens", None)


def is_own(tensor: Tensor) -> bool:
    """Whether a tensor is made of this rank's own tokens, as far as that was followed."""
    return _OWN in tensor.__dict__


def mark_own(tensor: Tensor, own: bool = True) -> Tensor:
    """The tensor, marked as made of this rank's own tokens, or as the same on all ranks."""
    if torch.compiler.is_compiling():  # a graph is not followed
        return tensor
    if own:
        tensor.__dict__[_OWN] = True
    else:
        tensor.__dict__.pop(_OWN, None)
    return tensor


def local_tokens(total: int) -> slice:
    """Which of a clip's `total` tokens this rank holds, in the sharded forward that runs.

    For code of a model that counts tokens by itself: a table of positions made for the whole clip becomes this rank's
    by `table[local_tokens(len(table))]`. Outside of a sharded forward, and before anything is split, it is all of
    them, so that one line serves a single device too.

    Raises:
        ValueError: the forward's tokens (or frames, where whole frames are spread) are not `total`.
    """
    tokens = running_tokens()
    if tokens is None:
        return slice(0, total)
    tokens.were_asked_for = True
    return tokens.own_range_of(total)


@dataclass
class State:
    """What a forward finds out about its tokens."""

    # Whether a forward found it out. It is False outside of a forward, and in a recomputation that brought none.
    is_known: bool = False
    # Whether it is the model's first forward with gradients, in which attention is checked.
    is_first: bool = False
    # Whether the ranks compare what they are given in this forward.
    is_compared: bool = False
    # Every rank's number of tokens.
    splits: tuple[int, ...] | None = None
    # Whether the model has whole tensors again, and may split another number of tokens.
    have_ended: bool = False
    # Shares are multiples of so many tokens: of a frame, for one.
    unit: int = 1
    # Where shares are whole frames, and a frame's size is known from the tokens alone.
    num_frames: int | None = None
    # Whether a rank may have no frames.
    may_be_empty: bool = True
    # Which dimension of a grid is spread over the ranks.
    spread: str | None = None
    # Whole sizes of a grid's dimensions.
    sizes: dict[str, int] = field(default_factory=dict)
    # What the forward is told of who sees whom, and which rank holds what of the tokens then.
    packed: Packed | None = None
    deal: slices.Deal | None = None

    @property
    def frames(self) -> tuple[int, ...] | None:
        """Every rank's number of frames, or of whatever else shares are whole units of."""
        return None if self.splits is None else tuple(size // self.unit for size in self.splits)


class Alone:
    """A sequence group of this rank alone, which may not be in any process group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Tokens:
    """The state of the running forward. Empty outside of one.

    A recomputation runs outside of it: a checkpoint has to bring the state along (`preserve`). Under one that
    does not, shares are unknown, the same on every rank. Self-attention exchanges them; what cannot, refuses
    (`check_known`).
    """

    def __init__(self, group: dist.ProcessGroup | Alone, *, are_packed: bool = False):
        self.group: Any = group
        self.state = State()
        # Whether forwards may be told of their tokens, and what the next one is.
        self.are_packed = are_packed
        self.packed: Packed | None = None
        # Of the ring that deals the tokens out then; 1 leaves them in order.
        self.ring_size = 1
        self.in_forward = False
        # Whether the model's own code knows that it has a share: `local_tokens`.
        self.were_asked_for = False
        # What takes the place of kernel calls in the model's attention modules: it says whose attention runs.
        self.attentions: list[Callable[..., Tensor]] = []
        # Every rank's number of the tokens whose keys a forward left in a cache, for those behind it.
        self.cached: weakref.WeakKeyDictionary[object, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._had_forward = False
        self._made: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Tensor]] = {}

    def own_range(self, splits: tuple[int, ...]) -> slice:
        """This rank's part of a dim with these shares: rank 1 of (3, 2, 2) has 3…4.

        Raises:
            ValueError: the tokens are dealt out, and are no run.
        """
        if self.state.deal is not None and splits == self.state.deal.splits and self.order("cpu") is not None:
            raise ValueError(
                "tokens are dealt out over a ring here, and the model counts on a run of them on each rank: say "
                "run_packed(model, …, balanced=False)"
            )
        rank = self.group.rank()
        return slice(sum(splits[:rank]), sum(splits[: rank + 1]))

    def order(self, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
        """All tokens [S] rank by rank, and the way back, where ranks do not hold them in the sequence's order."""
        if self.state.deal is None:
            return None
        from shardformer.spread.streams import order_on  # loads attention, which not every plan needs

        return order_on(self.state.deal, torch.device(device))

    def own_places(self, device: torch.device) -> Tensor:
        """[S/P]: where in the sequence this rank's tokens stand."""
        return self.own_rows(torch.arange(self.total(), device=device), 0)

    def own_rows(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's rows of a table of all tokens: [..., S at dim, ...] → [..., S/P, ...]."""
        splits, rank = self.state.splits, self.group.rank()
        assert splits is not None
        first = sum(splits[:rank])
        order = self.order(tensor.device)
        if order is None:
            return tensor.narrow(dim, first, splits[rank])
        return tensor.index_select(dim, order[0].narrow(0, first, splits[rank]))

    def own_range_of(self, total: int) -> slice:
        """This rank's part of a dim that holds all tokens, or all frames, or whatever of a grid is spread.

        Raises:
            ValueError: `total` is the number of none of these.
        """
        state = self.state
        if state.spread is not None:
            shares = {state.sizes[state.spread]: share_sizes(state.sizes[state.spread], self.group.size())}
        elif state.splits is None or state.frames is None or state.have_ended:
            return slice(0, total)
        else:
            # Both a table of tokens and one of frames may be asked about; their lengths tell them apart.
            shares = {sum(state.frames): state.frames, sum(state.splits): state.splits}
        if total not in shares:
            raise ValueError(
                f"local_tokens({total}): the tokens that are split over the ranks are {max(shares)}"
                + (f", the frames {min(shares)}" if len(shares) > 1 else "")
            )
        return self.own_range(shares[total])

    def own_counts(self) -> frozenset[int]:
        """This rank's number of tokens, and of frames where they are spread; none where its code knows of shares."""
        splits = self.state.splits
        if splits is None or self.were_asked_for:
            return frozenset()
        num_own = splits[self.group.rank()]
        # One is no sign of anything: every tensor that broadcasts has such a dim.
        return frozenset(count for count in (num_own, num_own // self.state.unit) if count > 1)

    def total(self) -> int:
        """The clip's number of tokens; 0 where it is not known."""
        return sum(self.state.splits or ())

    def are_followed(self) -> bool:
        """Whether a compiled region may depend on the state: in a forward after the first, whose attention is by no
        slices, which are not traced."""
        return self.state.is_known and not self.state.is_first and self.state.packed is None

    def check_known(self, what: str) -> None:
        """Refuses a recomputation that did not bring the state along.

        Raises:
            ValueError: the state is not known.
        """
        if not self.state.is_known:
            raise ValueError(
                f"{what} is recomputed by a checkpoint that shardformer does not know of (torch.utils.checkpoint, "
                "called by the model's own code), so that it is not known how the tokens are spread. Turn it off and "
                'use Plan(checkpoint="full"), or let that code call opensora_accel.checkpoint.checkpoint in place of '
                "torch's"
            )

    def check_all_have_some(self, total: int, name: str, what: str) -> None:
        """Refuses `total` frames, or whatever `name` says, that leave a rank without one.

        Raises:
            ValueError: there are fewer than ranks.
        """
        if total < self.group.size():
            raise ValueError(
                f"{what} has {total} {name}, and the model cannot run on none, as some of {self.group.size()} ranks "
                "would have to; use fewer sequence ranks"
            )

    def share(self, total: int, what: str) -> tuple[int, ...]:
        """Every rank's share of `total` tokens, in whole units.

        Raises:
            ValueError: another number was split before, some rank would have none, or the units do not fit.
        """
        # The first split of a forward shows how many tokens a frame has.
        if self.state.num_frames is not None and self.state.splits is None:
            self.state.unit = max(1, total // self.state.num_frames)
        if total < self.group.size():  # models are not written for no tokens; here all ranks say so together
            raise ValueError(
                f"{what} has {total} tokens, fewer than the {self.group.size()} ranks that share them"
            )
        if total % self.state.unit:
            raise ValueError(f"{what} has {total} tokens, which are no frames of {self.state.unit}")
        num_shared = total // self.state.unit
        if not self.state.may_be_empty:
            self.check_all_have_some(num_shared, "frames", what)
        splits = share_sizes(num_shared, self.group.size())
        splits = tuple(size * self.state.unit for size in splits)
        dealt = self._deal(total, splits, what)
        splits = splits if dealt is None else dealt.splits
        known = self.state.splits
        if known is not None and known != splits and not self.state.have_ended:
            raise ValueError(
                f"{what} has {total} tokens, but the tokens split before it were {sum(known)}; "
                "the policy splits tensors of different lengths"
            )
        if self.in_forward:  # not where another checkpoint recomputes a module that splits
            self.state.splits, self.state.have_ended, self.state.deal = splits, False, dealt
        return splits

    def _deal(self, total: int, splits: tuple[int, ...], what: str) -> slices.Deal | None:
        """Who holds what of the tokens, where the forward is told who sees whom."""
        packed, known = self.state.packed, self.state.deal
        if packed is None or packed.own is None:
            return None
        if packed.own.num_queries != total:
            raise ValueError(
                f"{what} has {total} tokens, and run_packed was told of {packed.own.num_queries} in {packed.spread}"
            )
        if known is not None:
            return known
        from opensora_accel.attention import slices
        from shardformer.spread.streams import deal_in_order

        # Shares of whole frames stay as they are.
        if packed.balanced and self.ring_size > 1 and self.state.unit == 1:
            ulysses = self.group.size() // self.ring_size
            return slices.deal(packed.own, self.group.size(), ulysses=ulysses, more_keys=packed.more_keys)
        return deal_in_order(packed.own, splits, packed.more_keys)

    def split(self, tensor: Tensor, dim: int, splits: tuple[int, ...], is_shared: bool) -> Tensor:
        """This rank's share: [..., S at dim, ...] → [..., S/P at dim, ...].

        Args:
            is_shared: several modules get this tensor; they get one and the same share.
        """

        def make() -> Tensor:
            if self.group.size() == 1:
                return tensor
            order = self.order(tensor.device) if splits == self.state.splits else None
            in_order = tensor if order is None else tensor.index_select(dim, order[0])
            return split_forward_gather_backward(in_order, self.group, dim, "down", splits=splits)

        return self.once(tensor, (dim, splits), make) if is_shared else mark_own(make())

    def gather(self, tensor: Tensor, dim: int, splits: tuple[int, ...] | None, what: str) -> Tensor:
        """All ranks' shares: [..., S/P at dim, ...] → [..., S at dim, ...].

        Gradient: a rank gets its share's, P times as large. The average over the sequence group divides by P again.

        Args:
            splits: every rank's share; None where a recomputation knows nothing of them, and asks the ranks.

        Raises:
            ValueError: nothing was split in this forward.
        """
        if splits is None and self.state.is_known:
            raise ValueError(
                f"the policy gathers {what}, but nothing was split in this forward: the module that splits was left "
                "out, by a cache for one; turn that off"
            )
        if self.group.size() == 1:
            return mark_own(tensor, False)
        whole = gather_forward_split_backward(tensor, self.group, dim, "up", splits=splits)
        order = self.order(tensor.device) if splits == self.state.splits else None
        return mark_own(whole if order is None else whole.index_select(dim, order[1]), False)

    def once(self, tensor: Tensor, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """`make()`, but once a forward for a tensor that many blocks get: one copy, one gradient to gather."""
        if not self.in_forward:
            return mark_own(make())
        # Under a reentrant checkpoint the forward records no graph: that share has no gradient to give.
        version = 0 if tensor.is_inference() else tensor._version
        # A tensor that was changed in place since has another version, and needs another share.
        key = id(tensor), version, torch.is_grad_enabled(), *key
        known = self._made.get(key)
        if known is None or known[0]() is not tensor:  # an id is a tensor's own while it lives
            known = self._made[key] = weakref.ref(tensor), mark_own(make())
        return known[1]

    def preserve(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` for a checkpoint, which calls it again: then in the state in which it was called first."""
        preserved: State | None = None

        def in_this_state(*args: Any, **kwargs: Any) -> Any:
            nonlocal preserved
            if preserved is not None:
                # A copy, so that a second recomputation (retain_graph) finds what this one found.
                before, self.state = self.state, replace(preserved)
                try:
                    with self.as_running(), preserve_state(self.preserve):
                        return function(*args, **kwargs)
                finally:
                    self.state = before
            spread = self.state.spread
            out = function(*args, **kwargs)
            # Shares may be found within; what is spread changes there, and counts as it was at the start.
            preserved = replace(self.state, spread=spread, sizes=dict(self.state.sizes), have_ended=False)
            return out

        return in_this_state

    @contextmanager
    def as_running(self) -> Iterator[None]:
        """Within it, `local_tokens` is about this model; its first forward, and what that recomputes, is not compiled.

        What is compiled cannot be checked, and a checkpoint wants of a recomputation the tensors that forward kept.
        """
        before, _running.tokens = running_tokens(), self
        try:
            with torch.compiler.set_stance("force_eager") if self.state.is_first else nullcontext():
                yield
        finally:
            _running.tokens = before

    def begin(self, is_compared: bool = False) -> None:
        """A forward begins."""
        is_first = torch.is_grad_enabled() and not self._had_forward
        self._had_forward |= is_first
        self.state, self.in_forward, self.were_asked_for = (
            State(is_known=True, is_first=is_first, is_compared=is_compared, packed=self.packed),
            True,
            False,
        )
        self._made.clear()

    def end(self) -> None:
        """The forward has ended, also by an error."""
        self.state, self.in_forward = State(), False
        self._made.clear()
