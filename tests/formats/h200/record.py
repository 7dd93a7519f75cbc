"""Records what the tests read from a CUDA device: `python record.py FOLDER`.

The files beside this were recorded on an NVIDIA H200 with torch 2.11.0+cu130 on 2026-11-18; folders of that
machine have other names in them, and lines are those of a script that was shorter than this one.
"""

import gzip
import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(folder):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256) for _ in range(4)], nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(2048, 256, device="cuda"), torch.randint(10, (2048,), device="cuda")

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    for _ in range(2):
        step()
    torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=True) as seen:
        step()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(folder / "profiler.json"))
    data = (folder / "profiler.json").read_bytes()
    (folder / "profiler.json.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
