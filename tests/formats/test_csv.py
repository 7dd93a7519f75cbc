import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConvertError, FormatError
from lowtide.formats import chainer, csvfile, megengine, tensorflow

rows = st.lists(st.tuples(st.integers(-9, 30), st.integers(1, 12), st.integers(0, 99)), max_size=12).map(
    lambda found: [(k, lower, lower + length, size) for k, (lower, length, size) in enumerate(found)]
)


def as_csv(found):
    return ("id,lower,upper,size\n" + "".join(f"b{k},{a},{b},{n}\n" for k, a, b, n in found)).encode()


@given(rows)
def test_rows_come_back_and_live_bytes_are_those_of_the_half_open_intervals(found):
    data = as_csv(found)
    step = csvfile.read(data)
    assert csvfile.write(step).data == data
    timeline = step.lifetimes()
    for k, op in enumerate(step.graph.ops):
        now = op.attributes["time"]
        assert timeline.live_bytes[k] == sum(n for _, a, b, n in found if a <= now < b)
    times = range(min((a for _, a, _, _ in found), default=0), max((b for _, _, b, _ in found), default=0))
    peak = max((sum(n for _, a, b, n in found if a <= t < b) for t in times), default=0)
    assert timeline.peak_bytes == peak


def test_offsets_are_addresses_and_columns_may_stand_in_any_order():
    step = csvfile.read(b"size,id,upper,lower,offset\r\n16,a,3,1,0\r\n8,b,2,1,16\r\n")
    assert [t.address for t in step.graph.tensors] == [0, 16]
    assert csvfile.write(step).data == b"id,lower,upper,size,offset\na,1,3,16,0\nb,1,2,8,16\n"


@pytest.mark.parametrize(("number", "module"), [("000", chainer), ("001", megengine)])
def test_a_step_becomes_lifetimes_with_the_same_peak_above_its_leaves(documents, number, module):
    step = module.read(documents[number])
    written = csvfile.write(step)
    leaves = step.lifetimes().live_bytes[0] if number == "000" else 102_106_528
    if number == "000":
        leaves = 124_401_416 + 10_469_888 + 4_817_408
    back = csvfile.read(written.data)
    assert back.lifetimes().peak_bytes == step.lifetimes().peak_bytes - leaves
    assert any("leaves" in loss for loss in written.losses)


BROKEN = {
    "": (1, "id,lower,upper,size"),
    "id,lower,upper\n": (1, "id,lower,upper,size"),
    "id,lower,upper,size,size\n": (1, "id,lower,upper,size"),
    "id,lower,upper,size\na,1,2\n": (2, "one a column"),
    "id,lower,upper,size\na,2,2,5\n": (2, "lower < upper"),
    "id,lower,upper,size\na,1,2,-5\n": (2, "not negative"),
    "id,lower,upper,size\na,1,2,5\na,1,2,5\n": (3, "one row an id"),
    "id,lower,upper,size\n,1,2,5\n": (2, "a name"),
    "id,lower,upper,size\na,x,2,5\n": (2, "a whole number"),
    "id,lower,upper,size\na,1,2,9999999999999999999\n": (2, "2^60"),
    "id,lower,upper,size\na,0,9223372036854775808,10\n": (2, "2^60"),
    "id,lower,upper,size\na,-9223372036854775808,0,10\n": (2, "2^60"),
    'id,lower,upper,size\n"a,1,2,5\n': (2, "comma-separated"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_files_say_where_and_what_was_expected(text):
    line, expected = BROKEN[text]
    with pytest.raises(FormatError) as caught:
        csvfile.read(text.encode())
    assert caught.value.line == line
    assert expected in str(caught.value)


def test_a_list_without_edges_has_no_lifetimes(documents):
    with pytest.raises(ConvertError, match="who reads what"):
        csvfile.write(tensorflow.read(documents["003"]))
