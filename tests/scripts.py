"""Scripts of examples/, run in this process, as PyTorch takes long to import; and scripts that torchrun starts."""

import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import torch

import lowtide

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed_by(name, folder, monkeypatch, capsys, **smaller):
    """What an example prints, with a cache and a folder of its own and a single thread.

    ``smaller`` has texts of the example that others take the place of, as ``size=("64", "32")``.
    """
    script = EXAMPLES / f"{name}.py"
    if smaller:
        text = script.read_text()
        for old, new in smaller.values():
            assert old in text, f"{name} has no {old}"
            text = text.replace(old, new)
        script = folder / f"{name}.py"
        script.write_text(text)
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    torch._dynamo.reset()
    if platform.machine() != "x86_64":  # oneDNN's backward of convolutions is many times slower there
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def torchrun(folder, *words, processes=2):
    """What torchrun printed for a script and its arguments, run in a folder with a cache of its own."""
    known = os.environ | {
        "LOWTIDE_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(lowtide.__file__).parents[1]),
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
    ]
    given = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words]
    return subprocess.run(
        [*command, *given], capture_output=True, text=True, env=known, cwd=folder, timeout=300
    )
