"""A reader of pickles that can build nothing but plain data."""

import os
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import FormatError
from lowtide.formats.pytorch.plain_pickle import MAX_DEPTH, read_plain_pickle

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


def refused(data, problem):
    with pytest.raises(FormatError, match=problem) as caught:
        read_plain_pickle(data)
    assert caught.value.byte is not None
    assert caught.value.expected
    return caught.value


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.integers(2, 5))
def test_plain_data_is_read_as_pickle_reads_it(value, protocol):
    data = pickle.dumps(value, protocol=protocol)
    try:
        found = read_plain_pickle(data).value
    except FormatError as error:  # no bytes before protocol 3; half characters become U+FFFD
        assert protocol == 2, error
        assert "GLOBAL" in str(error)
        return
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True apart


def test_long_lists_and_shared_parts():
    shared = {"line": 3}
    value = {"a": [shared] * 2500, "b": list(range(3000)), "x" * 300: (1, 2, 3, 4)}
    for protocol in range(2, 6):
        found = read_plain_pickle(pickle.dumps(value, protocol=protocol)).value
        assert found == value
        assert found["a"][0] is found["a"][-1]


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(tmp_path, protocol):
    target = tmp_path / "made"
    data = pickle.dumps({"segments": [Hostile(str(target))]}, protocol=protocol)
    with pytest.raises(FormatError):
        read_plain_pickle(data)
    assert not target.exists()


HOSTILE = {
    "GLOBAL": b"cos\nsystem\n", "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93", "REDUCE": b")R", "BUILD": b"}b",
    "INST": b"(ios\nsystem\n", "OBJ": b"(o", "NEWOBJ": b"))\x81", "NEWOBJ_EX": b")))\x92", "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00", "EXT4": b"\x84\x01\x00\x00\x00", "PERSID": b"P0\n", "BINPERSID": b"NQ",
    "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"N\x98", "BYTEARRAY8": b"\x96" + bytes(8), "EMPTY_SET": b"\x8f",
    "FROZENSET": b"(\x91", "POP": b"N0", "POP_MARK": b"(1", "DUP": b"N2", "LONG4": b"\x8b\x01\x00\x00\x00\x00",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_opcodes_that_build_something_are_refused(name):
    error = refused(b"\x80\x04" + HOSTILE[name] + b".", f"the opcode {name}$|the opcode {name};")
    assert str(error) == (
        f"byte {error.byte}: the opcode {name}; expected a pickle of plain data: containers, numbers and strings"
    )


def memoized(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def test_cycles_are_refused():
    itself = []
    itself.append(itself)
    error = refused(pickle.dumps(itself), "a container inside of itself")
    assert error.expected == "no cycles"
    table = {}
    table["a"] = [table]
    refused(pickle.dumps(table), "part of another already")
    around = [[]]
    around[0].append(around)
    refused(pickle.dumps(around), "part of another already")


def test_deep_nesting_is_refused():
    deep = b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b"."
    assert refused(deep, f"nested {MAX_DEPTH + 1} deep").expected == f"at most {MAX_DEPTH} levels"
    refused(b"\x80\x04" + b")" + b"\x85" * 50_000 + b".", "nested")
    inside_out = [b"]\x94"]  # each list is finished before the next one holds it
    inside_out += [b"]\x94h" + bytes([k]) + b"a" for k in range(60)]
    refused(b"\x80\x04" + b"".join(inside_out), "nested")
    level = []
    for _ in range(MAX_DEPTH - 1):
        level = [level]
    assert read_plain_pickle(pickle.dumps(level)).value == level


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x8d" + struct.pack("<Q", 1 << 60), "1152921504606846976 bytes, of which the file has"),
        (b"\x8e" + struct.pack("<Q", (1 << 64) - 1), "bytes, of which the file has"),
        (b"X" + struct.pack("<I", 1 << 31), "bytes, of which the file has"),
        (b"\x8a\xff" + b"\x01" * 255, "a whole number of 255 bytes"),
        (b"\x95" + struct.pack("<Q", 1 << 40), "a frame of"),
        (b"\x80\x09", "protocol 9"),
        (b"\xf7", "the opcode 0xf7"),
        (b"K", "1 bytes, of which the file has 0"),
        (b"h\x05", "value 5 is used, which was not stored"),
        (b"j\x05\x00\x00\x00", "value 5 is used"),
        (b"\x94", "a value is stored, and there is none"),
        (b"a", "a value is asked for"),
        (b"NNa", "members of something that is no list"),
        (b"e", "a mark is asked for"),
        (b"}(Nu", "a key without a value"),
        (b"}(K\x01Nu", "a int as a key"),
        (b"}(\x8c\x01aN\x8c\x01aNu", "a key that stands twice"),
        (b"\x8c\x01\xff", "a string that is not UTF-8"),
        (b"(N", "the file ends here"),
        (b"", "the file ends here"),
        (b"NN.", "values left over or none"),
        (b"(N.", "values left over or none"),
        (b"N.N", "more after the end"),
    ],
)
def test_damage_is_refused(data, problem):
    refused(b"\x80\x04" + data, problem)


def test_half_characters_of_file_names_are_replaced():
    found = read_plain_pickle(pickle.dumps("a\udc80b")).value
    assert found == "a\ufffd\ufffd\ufffdb"


def test_containers_know_their_byte():
    data = pickle.dumps({"a": [1, 2]}, protocol=2)
    plain = read_plain_pickle(data)
    assert data[plain.byte(plain.value) :][:1] == b"}"
    assert data[plain.byte(plain.value["a"]) :][:1] == b"]"
