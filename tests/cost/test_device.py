"""Descriptions of devices: kept as JSON, measured with real kernels."""

from pathlib import Path

import msgspec
import pytest
import torch

from lowtide.cost.device import Device, Environment, cache_folder, load_device, read_device, store_device
from lowtide.cost.probe import environment as environment_here
from lowtide.cost.probe import measure_device, torch_facts
from lowtide.errors import FileError, FormatError, ToolError
from tests.cost.plain import environment


def device(**changes):
    fields = {
        "environment": environment(),
        "matrix_flop_per_second": {"float32": 2e12, "bfloat16": 8e12},
        "bytes_per_second": 1e12,
        "launch_seconds": 5e-6,
        "memory_bytes": 1 << 34,
    }
    return Device(**fields | changes)


def test_a_device_comes_back_from_its_file(tmp_path):
    one = device(to_device_bytes_per_second=5e10, from_device_bytes_per_second=4e10)
    path = store_device(tmp_path / "new", one)
    assert read_device(path) == load_device(tmp_path / "new", one.environment) == one
    assert (one.name, one.kind) == ("a device", "cpu")


def test_only_the_same_environment_finds_it(tmp_path):
    store_device(tmp_path, device())
    assert load_device(tmp_path, environment(threads="9")) is None
    assert environment().key != environment(threads="9").key


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        msgspec.json.encode(device(bytes_per_second=0.0)),
        msgspec.json.encode(device(matrix_flop_per_second={})),
        msgspec.json.encode(device()).replace(b'"version":1', b'"version":2'),
    ],
)
def test_a_damaged_description_is_refused_and_measured_again(data, tmp_path):
    path = store_device(tmp_path, device())
    path.write_bytes(data)
    with pytest.raises(FormatError, match="lowtide doctor"):
        read_device(path)
    assert load_device(tmp_path, environment()) is None


def test_a_type_that_was_not_measured_has_the_rate_of_single_precision():
    assert device().matrix_rate("bfloat16") == 8e12
    assert device().matrix_rate("int64") == device().matrix_rate(None) == 2e12
    assert device(matrix_flop_per_second={"float64": 1e9}).matrix_rate("float32") == 1e9


def test_the_cache_folder_is_the_one_that_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("LOWTIDE_CACHE")
    assert cache_folder() == tmp_path / "shared" / "lowtide"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "lowtide"


def test_without_a_home_the_way_out_is_named(monkeypatch):
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(FileError, match="LOWTIDE_CACHE"):
        cache_folder()


def test_the_environment_changes_with_what_chooses_kernels():
    before = environment_here("cpu")
    assert before == environment_here("cpu")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert environment_here("cpu").key != before.key
    finally:
        torch.set_num_threads(threads)
    assert before.versions["torch"] == str(torch.__version__)
    assert isinstance(before, Environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ToolError, match="no CUDA device"):
        environment_here("cuda")
    assert torch_facts()["gpus"] == []


def test_this_processor_is_measured_with_real_kernels(tmp_path):
    one = measure_device("cpu")
    assert set(one.matrix_flop_per_second) >= {"float32", "float64", "bfloat16"}
    assert one.to_device_bytes_per_second is None
    store_device(tmp_path, one)
    assert load_device(tmp_path, environment_here("cpu")) == one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_has_links_to_the_host():
    one = measure_device("cuda")
    assert one.to_device_bytes_per_second > 0
    assert one.from_device_bytes_per_second > 0
    assert one.memory_bytes == torch.cuda.get_device_properties(0).total_memory
