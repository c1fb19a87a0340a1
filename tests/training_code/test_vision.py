"""Images: PyTorch's vae and super_resolution."""

from __future__ import annotations

import math
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import LoweringError
from shardwright.parallelize import parallelize

from .running import DOUBLE, PLANS, OneLine, check, check_refused, noise, parameters, seeded


class VAE(nn.Module):
    """Noise is drawn in the model, which draws by a seed of its own when it is compiled; or it comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        return self.fc21(hidden), self.fc22(hidden)

    def reparameterize(self, mu: Tensor, logvar: Tensor, eps: Tensor | None) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + std * (torch.randn_like(std) if eps is None else eps)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor, eps: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar, eps)), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae(one_line: OneLine, drawn: bool = False) -> list[Tensor]:
    """The loss is a function of the script, over all outputs; then a test, and samples by `decode`."""
    model = seeded(lambda: VAE().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for step in range(3):
        model.train()
        data = torch.sigmoid(noise(4, 1, 8, 8, seed=step))
        optimizer.zero_grad()
        recon, mu, logvar = model(data, *([] if drawn else [noise(4, 4, seed=10 + step)]))
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        seen.append(loss.detach().clone())
        optimizer.step()
    if not drawn:
        model.eval()
        with torch.no_grad():
            recon, mu, logvar = model(data, noise(4, 4, seed=20))
            seen.append(loss_function(recon, data, mu, logvar).clone())
            seen.append(model.decode(noise(2, 4, seed=30)).clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_vae(plan: str) -> None:
    check(vae, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_a_vae_that_draws_its_noise(plan: str) -> None:
    """A compiled model draws by its own seed and step, so that all plans draw alike."""

    def single(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        return parallelize(model, optimizer, plan="single", compile={"directory": tempfile.mkdtemp()})

    script, options = (lambda one_line: vae(one_line, drawn=True)), {}
    if plan == "pp=2":  # the draw of a batch is not that of its parts
        check_refused(script, plan, LoweringError, "randn_like", "microbatches=1")
        options = {"microbatches": 1}
    check(script, plan, reference=single, **options)


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 4, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(2)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.pixel_shuffle(self.conv2(self.relu(self.conv1(x))))


def super_resolution(one_line: OneLine) -> list[Tensor]:
    """Two epochs with a smaller last batch, and the PSNR of a test after each."""
    model = seeded(lambda: SuperResolution().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    criterion = nn.MSELoss()
    seen: list[Tensor] = []
    for _ in range(2):
        for iteration, size in enumerate((4, 2)):
            inputs, target = noise(size, 1, 6, 6, seed=iteration), noise(size, 1, 12, 12, seed=40 + iteration)
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            seen.append(loss.detach().clone())
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            mse = criterion(model(noise(2, 1, 6, 6, seed=8)), noise(2, 1, 12, 12, seed=48))
            seen.append(torch.tensor(10 * math.log10(1 / mse.item()), dtype=DOUBLE))
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_super_resolution(plan: str) -> None:
    check(super_resolution, plan)
