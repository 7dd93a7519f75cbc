"""Scripts of examples/, run in this process: PyTorch takes long to import."""

import platform
import runpy
from pathlib import Path

import torch

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
