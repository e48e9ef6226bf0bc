"""`opensora-accel shard`: the field's worked examples, figures, errors with the remedy, and no torch."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opensora_accel.cli import main as cli


def shard(capsys, *arguments):
    assert cli(["shard", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def placed(report):
    result = {axis: found["placement"] for axis, found in report["result"].items()}
    gradients = {n: {a: f["placement"] for a, f in found.items()} for n, found in report["gradients"].items()}
    needs = {(each["why"].partition(":")[0], each["kind"], each["axis"]) for each in report["collectives"]}
    return result, gradients, needs


WORKED_EXAMPLES = {
    "Megatron, column-parallel: all-reduce of the input's gradient": (
        ["sbi,io->sbo", "--axis", "tp: weight=o"],
        {"tp": "S(o)"},
        {"input": {"tp": "P"}, "weight": {"tp": "S(o)"}},
        {("backward", "all-reduce", "tp")},
    ),
    "Megatron, row-parallel: all-reduce of the output": (
        ["sbi,io->sbo", "--axis", "tp: input=i weight=i"],
        {"tp": "P"},
        {"input": {"tp": "S(i)"}, "weight": {"tp": "S(i)"}},
        {("forward", "all-reduce", "tp")},
    ),
    "norm under sequence parallelism: all-reduce of the weight's gradient": (
        ["sbc,c->sbc", "--axis", "sp: input=s"],
        {"sp": "S(s)"},
        {"input": {"sp": "S(s)"}, "weight": {"sp": "P"}},
        {("backward", "all-reduce", "sp")},
    ),
    "Ulysses: attention itself communicates nothing": (
        ["bshd,bthd->bhst", "--names", "q,k", "--axis", "ulysses: q=h k=h"],
        {"ulysses": "S(h)"},
        {"q": {"ulysses": "S(h)"}, "k": {"ulysses": "S(h)"}},
        set(),
    ),
    "vocabulary-parallel embedding: all-reduce of the rows": (
        ["sv,vc->sc", "--axis", "tp: input=v weight=v"],
        {"tp": "P"},
        {"input": {"tp": "S(v)"}, "weight": {"tp": "S(v)"}},
        {("forward", "all-reduce", "tp")},
    ),
    "MoE dispatch: tokens are whole, experts are spread": (
        ["te,tc->ec", "--names", "dispatch,tokens", "--axis", "ep: dispatch=e"],
        {"ep": "S(e)"},
        {"dispatch": {"ep": "S(e)"}, "tokens": {"ep": "P"}},
        {("backward", "all-reduce", "ep")},
    ),
    "data parallelism": (
        ["bi,io->bo", "--axis", "dp: input=b"],
        {"dp": "S(b)"},
        {"input": {"dp": "S(b)"}, "weight": {"dp": "P"}},
        {("backward", "all-reduce", "dp")},
    ),
}


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
def test_worked_examples_of_the_field(capsys, name):
    arguments, *expected = WORKED_EXAMPLES[name]
    assert list(placed(shard(capsys, *arguments))) == expected


def test_ulysses_needs_an_all_to_all_where_tokens_meet_heads(capsys):
    assert cli(["shard", "bshd,bthd->bhst", "--names", "q,k", "--axis", "ulysses: q=s k=h"]) == 2
    error = capsys.readouterr().err
    assert "all-to-all" in error and "blocks of a diagonal" in error


FIGURES = [
    "--sizes",
    "s=4096,b=8,i=5120,o=13824",
    "--degrees",
    "dp=4,tp=8",
    "--bandwidth",
    "200e9",
    "--flops",
    "400e12",
]


def test_bytes_seconds_and_the_ratio(capsys):
    axes = ["--axis", "dp: input=b", "--axis", "tp: weight=o"]
    report = shard(capsys, "sbi,io->sbo", *axes, *FIGURES)
    of_input, of_weight = report["collectives"]
    # The input's gradient is a quarter of the samples, the weight's an eighth of the columns; bf16, all-reduced.
    # Along a tree of 8 ranks a message passes log2(8) = 3 times, there and back.
    assert of_input["sent_bytes"] == 2 * 7 / 8 * 4096 * 2 * 5120 * 2
    assert of_weight["sent_bytes"] == 2 * 3 / 4 * 5120 * 13824 / 8 * 2
    assert of_input["time_s"] == pytest.approx(of_input["sent_bytes"] / 200e9 + 2 * 3 * 5e-6)
    compute_s = 3 * 2 * 4096 * 8 * 5120 * 13824 / 32 / 400e12
    expected = compute_s / (of_input["time_s"] + of_weight["time_s"])
    assert report["compute_over_communication"] == pytest.approx(expected)
    assert cli(["shard", "sbi,io->sbo", *axes, *FIGURES]) == 0
    text = capsys.readouterr().out
    assert "140 MiB sent by a rank" in text and "warning: under 3:1" in text


UNITS = ["--sizes", "s=2,b=2,i=2,o=2", "--bandwidth", "1e9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sbi,io->sbo"], 'name an axis and what lies how: --axis "tp: weight=o"'),
        (["sbi,io->sbo", "--axis", "tp"], "--axis is \"AXIS: OPERAND=PLACEMENT ...\"; got 'tp'"),
        (["sbi,io->sbo", "--axis", "tp: w=o"], "'w=o' is no OPERAND=PLACEMENT; operands: input, weight"),
        (["sbi,io->sbo", "--axis", "tp: weight=1"], "a placement is a label, R, I, P"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--axis", "tp: input=s"], "--axis tp is given twice"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--names", "a"], "has 2 operands; --names gives a"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--sizes", "s=2"], "b, i, o is missing"),
        (
            ["sbi,io->sbo", "--axis", "tp: weight=o", "--sizes", "z=2"],
            "'z=2' is no NAME=NUMBER; the names are s, b, i, o",
        ),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--degrees", "dp=2"], "the names are tp"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--flops", "1e12"], "need --bandwidth"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--latency", "1e-6"], "need --bandwidth"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", "--bandwidth", "1e9"], "need the labels' sizes"),
        (["sbi,io->sbo", "--axis", "tp: input=i"], "split weight along 'i'"),
        (["ii->i", "--axis", "tp: input=i"], "repeats the label 'i'"),
        (["sbi,io->sbo", "--axis", "tp: weight=o weight=i"], "--axis tp: weight is given twice, S(o) and i"),
        (
            ["sbi,io->sbo", "--axis", "tp: weight=o", "--degrees", "tp=2,tp=4"],
            "--degrees: tp is given twice, 2 and 4",
        ),
        (["BI,IO->BO", "--axis", "tp: weight=I"], "'I' is a placement, and a label of IO too; write S(I)"),
        (["RP,P->R", "--axis", "tp: input=P"], "'P' is a placement, and a label of RP too"),
        (
            ["sbi,io->sbo", "--axis", "tp: weight=o", *UNITS, "--flops", "0"],
            "--flops is a rank's FLOP/s, a finite number",
        ),
        (["sbi,io->sbo", "--axis", "tp: weight=o", *UNITS, "--flops", "-1"], "above 0; got -1"),
        (["sbi,io->sbo", "--axis", "tp: weight=o", *UNITS, "--flops", "nan"], "above 0; got nan"),
        (
            ["sbi,io->sbo", "--axis", "tp: weight=o", *UNITS, "--bandwidth", "nan"],
            "a finite bandwidth above 0",
        ),
        (
            ["sbi,io->sbo", "--axis", "tp: weight=o", *UNITS, "--bandwidth", "inf"],
            "a finite bandwidth above 0",
        ),
        (["sbi,io->sbo", "--axis", "tp: weight=o", *UNITS, "--latency", "nan"], "a latency of at least 0"),
    ],
)
def test_errors_name_the_remedy(capsys, arguments, message):
    assert cli(["shard", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_answers_in_two_seconds_without_torch():
    code = "import sys; from opensora_accel.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, "shard", "sbi,io->sbo", "--axis", "tp: weight=o"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 2.0
    assert "all-reduce over tp; backward: the gradient of input" in done.stdout


def test_labels_that_are_named_like_placements(capsys):
    report = shard(capsys, "BI,IO->BO", "--axis", "tp: input=S(I) weight=S(I)")
    assert report["result"]["tp"]["placement"] == "P"


@pytest.mark.parametrize("reduction", ["avg", "max", "min"])
def test_terms_that_are_not_summed_have_no_backward(capsys, reduction):
    """The help names these placements: they are derived in forward, and backward says that there is no rule."""
    report = shard(capsys, "sb->bs", "--axis", f"tp: input=P({reduction})", "--axis", "dp: input=b")
    assert report["result"]["tp"]["placement"] == f"P({reduction})"
    assert report["forward_only"] == {"tp": f"P({reduction})"}
    assert report["gradients"]["input"] == {"dp": report["gradients"]["input"]["dp"]}
    assert cli(["shard", "sb->bs", "--axis", f"tp: input=P({reduction})"]) == 0
    assert f"over tp: no rule for P({reduction}), which is no sum of terms" in capsys.readouterr().out


def test_uneven_shares_round_labels_and_not_bytes(capsys):
    """5 rows of 3 numbers on 2 ranks are 3 rows on the first, 9 numbers and not 8; FLOPs likewise."""
    sizes = [
        "--sizes",
        "s=5,b=1,i=3,o=7",
        "--bandwidth",
        "1e9",
        "--flops",
        "1e9",
        "--dtype",
        "fp32",
        "--latency",
        "0",
    ]
    report = shard(capsys, "sbi,io->sbo", "--axis", "sp: input=s", "--axis", "tp: weight=o", *sizes)
    of_input, of_weight = report["collectives"]
    assert of_input["axis"] == "tp" and of_input["sent_bytes"] == 3 * 3 * 4
    assert of_weight["axis"] == "sp" and of_weight["sent_bytes"] == 3 * 4 * 4  # 4 of 7 columns
    flops = 3 * 2 * 3 * 1 * 3 * 4
    seconds = (of_input["sent_bytes"] + of_weight["sent_bytes"]) / 1e9
    assert report["compute_over_communication"] == pytest.approx(flops / 1e9 / seconds)


def block_of_the_guide():
    text = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    return next(part for part in text.split("```") if "axes tp=8" in part).strip() + "\n"


def test_the_block_of_the_guide(capsys, tmp_path):
    path = tmp_path / "block.txt"
    path.write_text(block_of_the_guide(), encoding="utf-8")
    report = shard(capsys, "--chain", str(path))
    moves = {
        (m["tensor"], m["before"], m["after"], m["forward"]["kind"], m["backward"]["kind"])
        for m in report["moves"]
    }
    assert moves == {("h", "I", "R", "copy", "all-reduce"), ("terms", "P", "I", "all-reduce", "copy")}
    assert report["sent_bytes"] == 2 * 2 * 7 / 8 * 4096 * 5120 * 2
    assert report["tensors"]["scores"]["placements"] == {"tp": "S(h)"}
    assert report["tensors"]["h_used"]["gradient"] == {"tp": "P"}
    assert cli(["shard", "--chain", str(path), "--bandwidth", "200e9", "--flops", "400e12"]) == 0
    text = capsys.readouterr().out
    guide = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    assert text[text.index("to communicate") :].strip() in guide


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no steps"),
        ("x[sb]", "line 1 (x[sb]): the first line names the axes"),
        ("axes tp=0", "'tp=0' is no NAME=NUMBER"),
        ("axes tp=2\nx[sb]\naxes tp=4", "line 3 (axes tp=4): axes come before the first tensor"),
        ("axes tp=2\nx tp:R", "x needs its labels"),
        ("axes tp=2\nx[sb] R", "'R' is no AXIS:PLACEMENT"),
        ("axes tp=2\nx[sb] tp:S(b)\ny = map x along b", "line 3 (y = map x along b): y: x is S(b) over tp"),
        ("axes tp=2\nx[sb]\ny = gelu x", "there is no step 'gelu'; steps: einsum, map, add, rename, move"),
        ("axes tp=2\nx[sb]\ny = map x x", "map takes one tensor; got x x"),
        ("axes tp=2\nx[sb]\ny[s] = einsum z", "there is no tensor 'z' yet"),
        ("axes tp=2\nsizes s=4\nx[sb]\ny = move x tp:R", "the size of 'b' is missing"),
        ("axes tp=2\n???", "a step is NAME[labels] placements"),
        ("axes tp=2\nx[sb] tp:S(s) tp:R", "tp is given twice: tp:S(s) and tp:R"),
        ("axes tp=2 tp=4\nx[sb]", "tp is given twice"),
        ("axes tp=2\nx[sI] tp:I", "'I' is a placement, and a label of sI too"),
        ("axes tp=2\nx[ss]", "x[ss] repeats the label 's'"),
        ("axes tp=2\nsizes s=4 t=5\nx[s]\ny[t] = rename x", "a rename changes letters and no sizes"),
        ("axes tp=2\nx[st]\ny = map x along T", "x[st] has no label 'T' to run along"),
    ],
)
def test_a_wrong_line_is_named(capsys, tmp_path, text, message):
    path = tmp_path / "chain.txt"
    path.write_text(text, encoding="utf-8")
    assert cli(["shard", "--chain", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_chain_is_not_mixed_with_an_equation(capsys, tmp_path):
    assert cli(["shard", "i,i->", "--chain", "x.txt"]) == 2
    assert "leave the equation and its options out" in capsys.readouterr().err
    assert cli(["shard"]) == 2
    assert "give an equation" in capsys.readouterr().err
    assert cli(["shard", "--chain", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
