"""A tile log that contradicts itself or is no tile log: refused, with the place."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from lowtide.errors import FormatError
from lowtide.formats import tilelog

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
DATA = (DOCUMENTS / "004_45d0f2a7989644f5.txt").read_bytes()
TEXT = DATA.decode()
LINES = TEXT.split("\n")
CONV1, POOL1, CONV2, POOL2 = 139784840008080, 139784840008224, 139783032421920, 139784839957760


def first(old: str, new: str, after: str = "") -> str:
    """The document with the first occurrence after some place changed."""
    at = TEXT.index(old, TEXT.index(after))
    return TEXT[:at] + new + TEXT[at + len(old) :]


CONTRADICTIONS = [
    (first("1x1x16x16", "1x1x16x17"), "the shape kept", 6),
    (first("1x1x16x16", "1x3x16x16"), "one channel"),
    (first("1x1x16x16", "1x1x99999999999x16"), "a shape such as"),
    (first("after conv2d", "after conv3d"), "after <kind>"),
    (first("1x1x8x8", "1x1x7x8"), "divided by whole numbers"),
    (first(f"op {POOL1}", f"op {CONV1}"), "a new operator id"),
    (first(f"op {POOL1}", "op 7"), "expected maxpool2d7", 45),
    (first(f"op {POOL1}", "op 0012"), "leading zeros"),
    (first(f"op {POOL1}", "op -5"), "operator id"),
    (first("coord [0, 0]", "coord [0, 1]"), r"expected \[0, 1\]", 18),
    (first("coord [0, 0]", "coord [-1, 0]"), r"\[row, column\]"),
    (first("bwd_out_shape  (2, 2)", "bwd_out_shape  (2, 3)"), "bwd_out_shape"),
    (first("Yes, fwd", "No, fwd"), "Yes, fwd is smaller"),
    (first("<otileshape 2,2,>", "<otileshape 2,3,>"), "the size of"),
    (first("<otileshape 2,2,>", "<otileshape -2,2,>"), "the size of"),
    (first("<inpslidx 0,1,0,1,>", "<inpslidx 1,0,0,1,>"), "left <= right"),
    (first("<padding 1,0,1,0,>", "<padding 1,0,1,1,>"), "without the padding", 39),
    (first("<padding 1,0,1,0,>", "<padding -1,0,1,0,>"), "negative|padding"),
    (first("<padding 1,0,1,0,>", "<padding >"), "left,right,top,bottom"),
    (first("<internal 0,1,0,1,>", "<internal 0,2,0,1,>"), "padding and halo", 41),
    (first("<realidx -1,4,-1,4,>", "<realidx -1,4,-1,5,>"), "without the padding", 39),
    (first("<realidx 0,3,0,3,>", "<realidx 0,3,0,9999999999999999999999,>"), "realidx"),
    (first("<ndtsize 2,2,>", "<ndtsize 2,1,>"), "the output over 4 by 4"),
    (first("<ndtsize 2,2,>", "<ndtsize 2,2,2,>"), "ndtsize width,height"),
    (first("local_first True", "local_first False"), "expected True"),
    (first("next_id -99", "next_id 5"), "expected -99"),
    (first(f"next_id {POOL2}", "next_id 12"), f"expected {POOL2}"),
    (first("PI( <0,0,>", "PI( <0,1,>"), r"expected \[0, 0\]"),
    (first("[1,0] PI", "[2,0] PI"), r"expected \[1, 0\]"),
    (first("fake[-11,-11]", "fake[-11,-12]"), "fake"),
    (first(f", {POOL2}: ", ", 8: "), f"the key {POOL2}"),
    (first("}\n", "\n"), "`}`"),
    (first("put shape torch.Size([1, 1, 11, 11])", "put shape torch.Size([1, 1, 11, 12])"), "11, 11"),
    (first("ref grad_output", "ref grad_input"), "ref grad_output"),
    (first("1., 1.]]]], device", "1., 1.]]], device"), "four brackets", 1907),
    (first("[0., 1., 1., 0.,", "[0., 1., 2., 0.,"), "those of ref grad_input", 1924),
    (first("[ 0.2054, ", "[ 0.2x54, "), "as torch prints it"),
    (first("-0.1143", "-0.11430"), "fixed notation"),
    (first("weight shape torch.Size([1, 1, 3, 3])", "weight shape torch.Size([1, 1, 5, 5])"), "3, 3"),
    (first("crop [7", "crop [6"), r"crop \[7"),
    (first("PI( <3,3,>", "PI( <3,2,>", "^^^^^"), "PI"),
    (first(" precentile 0 / 256", " precentile 1 / 256"), "a ratio of"),
    (first(" precentile 0 / 256", " precentile 0 / 255"), "256 elements"),
    (first(" precentile 0", " precentile 00"), "plain numbers"),
    (first(" = 0.0", " = 0.5"), "expected 0.0"),
    (first(" = 0.0", " = nan"), "decimal number"),
    (TEXT + "more\n", "the end of the file", 5245),
]  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: case[1])
def test_contradictions_are_refused_where_they_stand(case):
    """At the changed line, or at a later one that it contradicts."""
    text, message, *other_line = case
    changed = next(
        k for k, (new, old) in enumerate(zip(text.split("\n"), LINES, strict=False), 1) if new != old
    )
    with pytest.raises(FormatError, match=message) as caught:
        tilelog.read(text.encode())
    assert caught.value.line == (other_line or [changed])[0]


def tile_text(row: int, column: int) -> str:
    start = TEXT.index(f"coord [{row}, {column}]\n")
    return TEXT[start : TEXT.index("coord [", TEXT.index("coord [", start + 1) + 1)]


def test_missing_double_and_swapped_tiles_are_refused():
    one, two = tile_text(1, 1), tile_text(1, 2)
    for text in (
        TEXT.replace(one, ""),
        TEXT.replace(one, one + one),
        TEXT.replace(one + two, two + one),
        TEXT.replace("".join(tile_text(0, k) for k in range(4)), ""),
        TEXT.replace("".join(tile_text(2, k) for k in range(4)), ""),
    ):
        assert text != TEXT
        with pytest.raises(FormatError, match=r"tile|part"):
            tilelog.read(text.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\0",
        b"\xff\xfe\x00",
        bytes(range(256)),
        DATA.decode().encode("utf-16"),
        b"\n" + b"&" * 38 + b"\n\nInput 1x1x16x16\n",
        b"[" * 1_000_000,
        DATA[:5000] + b"[" * 1_000_000,
        DATA.replace(b"1x1x16x16", b"1x1x999999999x999999999"),
        DATA.replace(b"16", b"9" * 4000),
        DATA[DATA.index(b"coord") :],
    ],
)
def test_other_data_is_refused_with_a_place(data):
    with pytest.raises(FormatError) as caught:
        tilelog.read(data)
    assert caught.value.line is not None or caught.value.byte is not None


def test_truncation_is_always_refused():
    for size in range(0, len(DATA) - 1, 2497):
        with pytest.raises(FormatError):
            tilelog.read(DATA[:size])
    assert tilelog.read(DATA[:-1]) == tilelog.read(DATA)  # but for the last line feed


def mutate(rng: random.Random) -> bytes:
    kind = rng.randrange(7)
    k = rng.randrange(len(LINES))
    if kind == 0:
        return "\n".join(LINES[:k] + LINES[k + rng.randrange(1, 60) :]).encode()
    if kind == 1:
        return "\n".join(LINES[:k] + LINES[k : k + rng.randrange(1, 60)] + LINES[k:]).encode()
    if kind == 2:
        lines, other = LINES.copy(), rng.randrange(len(LINES))
        lines[k], lines[other] = lines[other], lines[k]
        return "\n".join(lines).encode()
    if kind == 3:
        number = rng.choice(["-1", "99999999999", "9" * 30, "1e999", "", "0x10", str(rng.randrange(40))])
        lines = LINES.copy()
        lines[k] = re.sub(r"-?\d+", number, lines[k], count=rng.randrange(1, 4))
        return "\n".join(lines).encode()
    at = rng.randrange(len(DATA))
    if kind == 4:
        return DATA[:at] + rng.choice([b"[[[[", b"]]]]", b"\0", b"\xff", b"tensor(", b"}", b"("]) + DATA[at:]
    if kind == 5:
        return DATA[:at] + DATA[at + rng.randrange(1, 3000) :]
    return DATA[:at] + bytes([DATA[at] ^ (1 << rng.randrange(8))]) + DATA[at + 1 :]


@pytest.mark.parametrize("seed", range(3))
def test_damage_is_read_or_refused_and_nothing_else(seed):
    rng = random.Random(seed)
    refusals = []
    for _ in range(60):
        data = mutate(rng)
        tilelog.recognise(data)
        try:
            step = tilelog.read(data)
        except FormatError as error:
            refusals.append(error)
            continue
        assert tilelog.read(tilelog.write(step).data).graph.ops == step.graph.ops
    assert all(error.line is not None or error.byte is not None for error in refusals)
    assert len(refusals) > 40
