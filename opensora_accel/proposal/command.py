"""`opensora-accel policy`: a table for a model that has none."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.files import check_folder_of
from opensora_accel.flash_attn import flash_attn_stand_in
from opensora_accel.observe import load_file
from opensora_accel.proposal.propose import Proposal, propose_policy
from opensora_accel.verify import show_on_terminal
from shardformer.policy import find_policy

_DESCRIPTION = """\
Proposes a policy, the table by which shardformer.shard makes a model sequence-parallel, for a model that has none. The
model runs a few forwards on this machine, which show its blocks, its attention, and where tokens enter and leave. What
they cannot show is tried in several ways: each table is proven on 2 and 3 CPU ranks against one device, in fp64, and
the first with the same gradients is printed. No GPU is needed. Exit status: 0 the table is proven, 1 none was right,
2 nothing could be proposed."""

_EXAMPLES = """\
examples:
  opensora-accel policy --model my_model.py:make_model --inputs my_model.py:make_inputs
  opensora-accel policy --model my_package.models:MyDiT --inputs my_inputs.py:make_inputs --out my_policy.py

a file for both (docs/policies.md):
  def make_model():                    # tiny: 2 blocks, the same weights on every rank
      torch.manual_seed(0)
      return MyDiT(depth=2, hidden_size=36, num_heads=3)

  def make_inputs():                   # of its forward, by name: more video tokens than text, no two sizes the same
      return {"x": torch.randn(2, 4, 5, 6, 10), "t": torch.rand(2), "text": torch.randn(2, 7, 16)}

then, in the training loop:
  from my_policy import POLICY
  shardformer.shard(model, plan, policy=POLICY)"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit status.

    Raises:
        ValueError, FileNotFoundError: options that name nothing, or a model of which nothing can be proposed.
    """
    parser = argparse.ArgumentParser(
        prog="opensora-accel policy",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = "MODULE:NAME or FILE.py:NAME"
    parser.add_argument(
        "--model",
        required=True,
        metavar=where,
        help="a function or class that makes the model, without arguments",
    )
    parser.add_argument(
        "--inputs",
        required=True,
        metavar=where,
        help="a function that makes the arguments of its forward, a dict",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.py", help="write the table there too")
    options = parser.parse_args(arguments)
    check_folder_of(options.out)
    model_fn, inputs_fn = _named("--model", options.model), _named("--inputs", options.inputs)
    try:
        proposal = propose_policy(model_fn, inputs_fn, on_progress=show_on_terminal)
    finally:
        show_on_terminal("")  # the line of progress goes, whatever comes next
    text = _text(proposal)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    try:
        known = find_policy(model_fn())
    except ValueError:
        known = None
    if known is not None:  # not among what is printed, which is Python
        message = f"this model has a policy already, which shard takes by itself: that of {known.models[0]}"
        print(message, file=sys.stderr)
    return 0 if proposal.ok else 1


def _text(proposal: Proposal) -> str:
    """The table, with what was found in comments above it: all of it is Python."""
    name = proposal.policy.models[0]
    compared = max(len(mesh.parameters()) for mesh in proposal.report.results)
    head = [
        f"Proposed for {name}, and proven: {compared} gradients are those of one device (fp64; ulysses 2, ring 3)."
        if proposal.ok
        else f"Proposed for {name}, and WRONG: mend it by what is said here, and by docs/policies.md."
    ]
    tried = [attempt for attempt in proposal.attempts if not attempt.ok]
    head += [f"Tried and wrong ({i + 1}): {attempt.reason}" for i, attempt in enumerate(tried)]
    head += [f"Look at this: {each}." for each in proposal.unsure]
    return "\n".join([*(f"# {line}" for each in head for line in each.splitlines()), str(proposal)])


def _named(option: str, given: str) -> Callable[[], Any]:
    """What `given` names, as something that can be called and sent to another process.

    Raises:
        ValueError, FileNotFoundError: it names nothing that can be called without arguments.
    """
    place, _, name = given.rpartition(":")
    if not place or not name:
        raise ValueError(f"{option} is MODULE:NAME or FILE.py:NAME, as my_model.py:make_model; got {given!r}")
    named = _Named(place, name)
    function = named.get()
    if not callable(function):
        raise ValueError(f"{option}: {place} has no {name} that can be called")
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    if needed:
        raise ValueError(
            f"{option}: {name} needs {', '.join(needed)}; name a function without arguments, such as "
            f"def make(): return {name}({needed[0]}=…)"
        )
    return named


@dataclass(frozen=True)
class _Named:
    """An object of a module or file, looked up in each process for itself."""

    place: str
    name: str

    def get(self) -> Any:
        with flash_attn_stand_in():
            if not self.place.endswith(".py"):
                if "" not in sys.path:
                    sys.path.insert(0, "")  # modules of the working folder, as `python -m` finds them
                try:
                    return getattr(importlib.import_module(self.place), self.name, None)
                except ModuleNotFoundError as error:
                    if error.name is None or not f"{self.place}.".startswith(f"{error.name}."):
                        raise  # what the module needs itself is not installed
                    raise ValueError(
                        f"there is no module {self.place}; start this where it can be imported, or name its file"
                    ) from error
            path = Path(self.place)
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            return getattr(load_file(path), self.name, None)

    def __call__(self) -> Any:
        return self.get()()
