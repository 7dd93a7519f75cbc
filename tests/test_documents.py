import msgspec
import pytest

from lowtide.documents import decode_document, encode_document, read_document, write_document
from lowtide.errors import FileError, FormatError
from lowtide.graph import Recording, Timeline
from lowtide.plan.program.instructions import Drop, Program, Run

PROGRAM = Program((Run(0), Run(1, in_place=0), Drop((3, 4))), (Run(2), Drop(())))


def test_a_program_comes_back(tmp_path):
    path = tmp_path / "program.json"
    write_document(path, PROGRAM)
    assert read_document(path, Program) == PROGRAM
    assert msgspec.json.decode(path.read_bytes())["version"] == 2


def test_a_program_says_which_convolutions_are_split():
    split = msgspec.structs.replace(PROGRAM, split=("convolution_backward_1",))
    data = encode_document(split)
    assert decode_document(data, Program) == split
    fields = msgspec.json.decode(data)
    del fields["split"]  # as files of older versions are
    for version in (1, 2):
        assert decode_document(msgspec.json.encode(fields | {"version": version}), Program) == PROGRAM


def test_a_recording_comes_back():
    recording = Recording(("conv",), Timeline((5,), resident_bytes=2))
    assert decode_document(encode_document(recording), Recording) == recording


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b'{"lowtide":"program"', "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"lowtide":"timeline","version":1}', "this is a timeline file"),
        (b'{"lowtide":"program","version":9,"forward":[]}', "version 9"),
        (b'{"lowtide":"program","version":1}', "forward"),
        (b'{"lowtide":"program","version":1,"forward":[{"type":"run","op":"x"}]}', r"\$.forward\[0\].op"),
        (b'{"lowtide":"program","version":1,"forward":[{"type":"fly"}]}', "fly"),
        (b'{"lowtide":"program","version":1,"forward":[],"more":1}', "more"),
        (b'{"lowtide":"program",,', r"byte 21"),
        (b"\xff\xfe", "byte"),
        (b'{"lowtide":"program","version":1,"forward":' + b"[" * 5000, "program file of version 2"),
    ],
)
def test_bad_files_say_where_and_what(data, said):
    with pytest.raises(FormatError, match=said):
        decode_document(data, Program)


def test_every_cut_is_refused():
    data = encode_document(PROGRAM).rstrip()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            decode_document(data[:end], Program)


def test_the_file_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match="x.json"):
        read_document(path, Program)
    with pytest.raises(FileError):
        read_document(tmp_path / "none", Program)
