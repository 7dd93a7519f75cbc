"""A training loop in half of its memory: python examples/training_loop.py (seconds, on a CPU)."""

import torch
from torch import Tensor, nn

import lowtide


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The step: what `backward` is called on."""
    return nn.functional.cross_entropy(model(images), labels)


torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())]
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Flatten(), nn.Linear(16 * 64 * 64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))

step = lowtide.fit(loss_of, model, images, labels, budget="50%")  # or "8GiB", or "auto"
print("\n".join(step.plan.explain().splitlines()[:5]))
for number in range(3):
    loss = step(model, images, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {number}: loss {loss.item():.4f}")
