import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli, main
from lowtide.formats.registry import FORMATS, read_file
from tests.conftest import document_path

PROFILE = str(document_path("001"))
GRAPH = str(document_path("000"))


def run(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def run_main(*arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code, capsys.readouterr()


def test_the_commands_are_these():
    assert sorted(cli.commands) == [
        "address", "check", "convert", "demo", "diff", "doctor", "formats", "plan", "profile", "report", "run",
        "shard", "show", "tile", "top",
    ]  # fmt: skip


@pytest.mark.parametrize("number", ["000", "001", "002", "003", "004"])
def test_show_says_what_it_is_and_where_the_peak_is(number):
    result = run("show", str(document_path(number)))
    assert result.exit_code == 0, result.output
    assert "operators" in result.stdout
    assert "peak" in result.stdout
    assert "\x1b[" not in result.stdout


def test_show_prints_the_peak_with_its_bytes_and_operator():
    text = run("show", GRAPH).stdout
    assert "7,329,956,112 bytes" in text
    assert "backward operator 6" in text
    assert "6.24 GiB live between forward and backward" in text
    assert "█" in text


def test_top_by_time_matches_the_document():
    view = json.loads(run("top", PROFILE, "--json", "--limit", "0").stdout)
    document = json.loads(document_path("001").read_bytes())
    times = {
        document["graph_exec"]["operator"][op]["name"]: lanes["gpu0:0"]["end"] - lanes["gpu0:0"]["kern"]
        for op, lanes in document["profiler"]["device"].items()
    }
    assert [row["name"] for row in view["rows"][:5]] == sorted(times, key=times.get, reverse=True)[:5]
    assert view["sort"] == "time"
    assert view["total"] == len(view["rows"]) == 234
    total = sum(times.values())
    first = view["rows"][0]
    assert first["share"] == pytest.approx(times[first["name"]] / total)
    assert view["rows"][-1]["cumulative_share"] == pytest.approx(1)
    assert first["flop_per_second"] == pytest.approx(first["flop"] / first["seconds"])


def test_top_by_type_adds_up():
    rows = json.loads(run("top", PROFILE, "--json", "--by", "type", "--limit", "0").stdout)["rows"]
    conv = next(row for row in rows if row["name"] == "ConvolutionForward")
    assert conv["count"] == 53
    assert sum(row["count"] for row in rows) == 234
    assert sum(row["flop"] or 0 for row in rows) == 81_954_092_640


@pytest.mark.parametrize(
    ("sort", "field"),
    [("flop", "flop"), ("bytes", "bytes"), ("workspace", "workspace_bytes"), ("time", "seconds")],
)
def test_top_sorts_largest_first(sort, field):
    rows = json.loads(run("top", PROFILE, "--json", "--sort", sort, "--limit", "0").stdout)["rows"]
    values = [row[field] or 0 for row in rows]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0


def test_the_largest_workspace_is_that_of_the_document():
    rows = json.loads(run("top", PROFILE, "--json", "--sort", "workspace", "--limit", "1").stdout)["rows"]
    assert rows[0]["workspace_bytes"] == 26_216_960


def test_top_filters_by_name_and_type():
    rows = json.loads(run("top", PROFILE, "--json", "--filter", r"^pooling", "--limit", "0").stdout)["rows"]
    assert len(rows) == 2
    rows = json.loads(run("top", PROFILE, "--json", "--type", "Reduce").stdout)["rows"]
    assert {row["kind"] for row in rows} == {"Reduce"}


def test_host_times_are_those_of_the_issuing_thread():
    rows = json.loads(run("top", PROFILE, "--json", "--host", "--limit", "0").stdout)["rows"]
    assert sum(row["seconds"] for row in rows) < 0.003896
    assert all(row["flop_per_second"] is None for row in rows)


def test_diff_puts_what_got_slower_first(tmp_path):
    document = json.loads(document_path("001").read_bytes())
    document["profiler"]["device"]["621"]["gpu0:0"]["end"] += 1.0
    document["profiler"]["device"]["619"]["gpu0:0"]["end"] -= 1e-6
    other = tmp_path / "slower.json"
    other.write_text(json.dumps(document))
    view = json.loads(run("diff", PROFILE, str(other), "--json", "--limit", "0").stdout)
    assert view["rows"][0]["name"] == document["graph_exec"]["operator"]["621"]["name"]
    assert view["rows"][0]["change"] == pytest.approx(1.0)
    assert view["rows"][-1]["name"] == document["graph_exec"]["operator"]["619"]["name"]
    assert view["rows"][-1]["change"] < 0
    text = run("diff", PROFILE, str(other), "--by", "type").stdout
    assert "ConvolutionForward" in text
    assert "+1.000 s" in text


def test_diff_of_steps_that_share_nothing_lists_both_sides():
    view = json.loads(
        run("diff", GRAPH, PROFILE, "--json", "--by", "type", "--sort", "bytes", "--limit", "0").stdout
    )
    sides = {row["name"]: (row["count_a"], row["count_b"]) for row in view["rows"]}
    assert sides["ReLU"] == (44, 0)
    assert sides["ConvolutionForward"] == (0, 53)


def test_convert_writes_the_file_and_says_what_is_lost(tmp_path):
    out = tmp_path / "out.csv"
    result = run("convert", PROFILE, "--to", "csv", "-o", str(out))
    assert result.exit_code == 0
    assert f"Wrote {out}" in result.stdout
    assert "not held by csv: 468 spans of the profile" in result.stderr
    assert read_file(out).format.name == "csv"


@pytest.mark.parametrize("number", ["000", "001", "002", "003", "004"])
def test_every_document_becomes_our_own_file_and_back(number, tmp_path):
    path = document_path(number)
    loaded = read_file(path)
    ours, back = tmp_path / "step.json", tmp_path / "back"
    assert run("convert", str(path), "--to", "native", "-o", str(ours)).exit_code == 0
    assert read_file(ours).step == loaded.step
    original = json.loads(run("show", str(path), "--json").stdout)
    again = json.loads(run("show", str(ours), "--json").stdout)
    assert again.pop("format") == "native"
    del original["format"]
    assert again == original
    if number in ("000", "003"):
        assert run("convert", str(ours), "--to", loaded.format.name, "-o", str(back)).exit_code == 0
        assert back.read_bytes() == path.read_bytes()


def test_formats_lists_all_of_them():
    rows = json.loads(run("formats", "--json").stdout)
    assert [row["name"] for row in rows] == list(FORMATS)
    assert "chainer" in run("formats").stdout


BAD = {
    ("show", "no-such-file"): "cannot be read",
    ("show", "."): "not a regular file",
    ("shwo", GRAPH): "Did you mean 'show'",
    ("top", PROFILE, "--type", "Elemwize"): "Did you mean 'Elemwise'",
    ("top", PROFILE, "--filter", "("): "no regular expression",
    ("top", PROFILE, "--sort", "tim"): "Did you mean 'time'?",
    ("convert", GRAPH, "--to", "csv", "-o", GRAPH): "the file that is read",
    ("convert", GRAPH, "--to", "csv", "-o", "/dev/null"): "not a regular file",
    ("top", PROFILE, "--sotr", "time"): "--sort",
    ("top", PROFILE, "--limit", "-1"): "limit",
    ("convert", GRAPH, "--to", "chainr", "-o", "out"): "Did you mean 'chainer'?",
    ("convert", GRAPH, "--to", "csv", "-o", "no/such/folder/out"): "cannot be written",
    ("convert", str(document_path("003")), "--to", "csv", "-o", "out"): "who reads what",
    ("convert", GRAPH, "--to", "csv"): "Missing option",
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda a: " ".join(Path(x).name for x in a))
def test_bad_input_exits_2_with_help_and_writes_nothing(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed = run_main(*arguments, capsys=capsys)
    assert code == 2
    assert BAD[arguments] in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_with_the_line(tmp_path, capsys):
    path = tmp_path / "damaged.txt"
    path.write_bytes(document_path("000").read_bytes().replace(b"\n1 2048 /conv", b"\n1 -2048 /conv", 1))
    code, printed = run_main("show", str(path), capsys=capsys)
    assert code == 2
    assert f"{path}: line 3" in printed.err


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01", b"hello\n", b"\xff\xfe{\x00", b"[1, 2, 3]"])
def test_what_no_format_recognises_is_refused(data, tmp_path, capsys):
    path = tmp_path / "unknown"
    path.write_bytes(data)
    code, printed = run_main("show", str(path), capsys=capsys)
    assert code == 2
    assert "chainer" in printed.err


def test_a_file_that_is_replaced_is_replaced_whole(tmp_path, capsys):
    out = tmp_path / "out.json"
    out.write_text("precious")
    code, _ = run_main("convert", str(document_path("003")), "--to", "csv", "-o", str(out), capsys=capsys)
    assert code == 2
    assert out.read_text() == "precious"
    code, _ = run_main("convert", GRAPH, "--to", "native", "-o", str(out), capsys=capsys)
    assert code == 0
    assert read_file(out).format.name == "native"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_colour_only_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("show", GRAPH).stdout
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b[" not in run("show", GRAPH).stdout


def test_help_says_what_lowtide_does():
    text = " ".join(run("--help").stdout.split())
    for word in ("captures a PyTorch training step", "budget", "runs", "other frameworks"):
        assert word in text
    assert "..." not in text.partition("Commands:")[2], "a summary is cut off"


def test_help_says_what_the_exit_codes_are():
    text = " ".join(run("--help").stdout.split())
    for code in ("0 done", "2 bad input", "130 interrupted"):
        assert code in text


def test_python_dash_m_works_and_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m lowtide top {PROFILE} --limit 0 | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "operator" in result.stdout
    assert result.stderr == ""
    # as any program on Unix: ended by the signal that says so, unless all was written before
    assert result.stdout.split()[-1] in ("141", "0")


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(one, marks=pytest.mark.extended) for one in ("latin-1", "utf-8"))]
)
def test_any_output_encoding_will_do(encoding):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    for arguments in (["show", GRAPH], ["show", "--json", str(document_path("002"))]):
        command = [sys.executable, "-m", "lowtide", *arguments]
        result = subprocess.run(command, capture_output=True, check=True, env=environment)
        assert result.stderr == b""


def test_a_full_disk_is_said():
    command = f"{sys.executable} -m lowtide show {GRAPH} > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("top", PROFILE), ("diff", PROFILE, PROFILE), ("show", GRAPH)])
def test_numbers_stand_whole_on_a_narrow_terminal(arguments, monkeypatch):
    wide = run(*arguments).stdout
    numbers = set(re.findall(r"\d[\d.]* (?:[KMG]iB|µs|ms)", wide))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("lowtide.commands.common._PIPE_WIDTH", 80)
    narrow = run(*arguments).stdout
    assert all(len(line) <= 80 for line in narrow.splitlines() if "…" in line)
    shown = set(re.findall(r"\d[\d.]* (?:[KMG]iB|µs|ms)", narrow))
    assert len(shown) > 5
    assert shown <= numbers
    assert not re.search(r"\d…", re.sub(r"[^ ]*\[[^ ]*…", "", narrow))


def test_a_buffer_of_no_bytes_can_be_shown(tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("id,lower,upper,size,offset\na,0,1,0,5\n")
    result = run("show", str(path))
    assert result.exit_code == 0, result.output


def test_nothing_that_matches_is_said():
    assert "No operator matches" in run("top", PROFILE, "--filter", "zzz").stdout
    assert "No operator matches" in run("diff", PROFILE, PROFILE, "--filter", "zzz").stdout


def test_estimates_carry_a_tilde():
    assert "forward ~168.49 GFLOP" in run("show", str(document_path("003"))).stdout
    assert "forward 81.95 GFLOP" in run("show", PROFILE).stdout


def test_a_comparison_is_by_what_both_sides_know():
    assert json.loads(run("diff", PROFILE, GRAPH, "--json").stdout)["sort"] == "bytes"
    assert json.loads(run("diff", PROFILE, PROFILE, "--json").stdout)["sort"] == "time"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), FileNotFoundError(2, "gone", "x")])
def test_an_error_that_is_not_of_the_output_is_no_error_of_the_output(error, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr("lowtide.commands.show.load", fails)
    with pytest.raises(OSError, match="gone|No space") as caught:
        main(["show", str(GRAPH)])
    assert caught.value is error
