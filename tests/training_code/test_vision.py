"""Images: PyTorch's vae, dcgan and super_resolution, a WGAN with gradient penalty, a diffusion UNet."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .running import OneLine, check, parameters, seeded

DOUBLE = torch.float64


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


class VAE(nn.Module):
    """Noise comes in as an input, so that both runs draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae(one_line: OneLine) -> list[Tensor]:
    """The loss is a function of the script, over all outputs."""
    model = seeded(lambda: VAE().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for step in range(3):
        x = torch.sigmoid(noise(4, 1, 8, 8, seed=step))
        optimizer.zero_grad()
        recon, mu, logvar = model(x, noise(4, 4, seed=10 + step))
        bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
        loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        seen.append(loss.detach().clone())
        optimizer.step()
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "auto"])
def test_vae(plan: str) -> None:
    check(vae, plan)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, 1, 0, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1)


def dcgan(one_line: OneLine) -> list[Tensor]:
    """Two models with an optimizer each, trained in turns; the fake batch is used twice."""
    net_d, net_g = seeded(lambda: (Discriminator().double(), Generator().double()))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-2, betas=(0.5, 0.999))
    net_d, optimizer_d = one_line(net_d, optimizer_d)
    net_g, optimizer_g = one_line(net_g, optimizer_g)
    criterion = nn.BCEWithLogitsLoss()
    seen: list[Tensor] = []
    for step in range(2):
        net_d.zero_grad()
        real = noise(4, 3, 8, 8, seed=step)
        loss_real = criterion(net_d(real), torch.ones(4, dtype=DOUBLE))
        loss_real.backward()
        fake = net_g(noise(4, 4, 1, 1, seed=20 + step))
        loss_fake = criterion(net_d(fake.detach()), torch.zeros(4, dtype=DOUBLE))
        loss_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        loss_g = criterion(net_d(fake), torch.ones(4, dtype=DOUBLE))
        loss_g.backward()
        optimizer_g.step()
        seen += [loss.detach().clone() for loss in (loss_real, loss_fake, loss_g)]
    return seen + parameters(net_d) + parameters(net_g)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_dcgan(plan: str) -> None:
    check(dcgan, plan)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 4, 4, 2, 1), nn.Linear(64, 16), nn.Linear(16, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(x), 0.2).flatten(1)
        return self.score(self.down(torch.tanh(self.up(x))).sigmoid()).view(-1)


def wgan_gp(one_line: OneLine) -> list[Tensor]:
    """A penalty on the norm of the critic's gradient: backward through a backward."""
    critic = seeded(lambda: Critic().double())
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.0, 0.9))
    critic, optimizer = one_line(critic, optimizer)
    seen: list[Tensor] = []
    for step in range(2):
        real, fake = noise(4, 3, 8, 8, seed=step), noise(4, 3, 8, 8, seed=30 + step)
        mixed = (0.3 * real + 0.7 * fake).requires_grad_(True)
        scores = critic(mixed)
        (gradient,) = torch.autograd.grad(
            scores, mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        penalty = ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    return seen + parameters(critic)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_wgan_gp(plan: str) -> None:
    check(wgan_gp, plan)


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
    model = seeded(lambda: SuperResolution().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    criterion = nn.MSELoss()
    seen: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = criterion(model(noise(4, 1, 6, 6, seed=step)), noise(4, 1, 12, 12, seed=40 + step))
        seen.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2", "auto"])
def test_super_resolution(plan: str) -> None:
    check(super_resolution, plan)


class Output(OrderedDict):
    """What diffusers' models return: a dict whose values are attributes too."""

    def __init__(self, sample: Tensor) -> None:
        super().__init__(sample=sample)
        self.sample = sample


torch.utils._pytree.register_pytree_node(  # as diffusers does it: without the names of keys
    Output, lambda out: (list(out.values()), list(out)), lambda values, keys: Output(*values)
)


class ResnetBlock(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, out)
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(16, out)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(embedding))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (x if self.shortcut is None else self.shortcut(x))


class UNet(nn.Module):
    """Down, attention in the middle, up with skip connections, the step as sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.conv_in, self.conv_out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down = nn.ModuleList([ResnetBlock(8, 8), ResnetBlock(8, 16)])
        self.pool = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm, self.qkv, self.proj = nn.GroupNorm(2, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up = nn.ModuleList([ResnetBlock(32, 8), ResnetBlock(16, 8)])

    def forward(self, sample: Tensor, timestep: Tensor) -> Output:
        half = torch.exp(-math.log(10000) * torch.arange(4, dtype=sample.dtype) / 4)
        angles = timestep[:, None].to(sample.dtype) * half[None]
        embedding = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.conv_in(sample)
        first = self.down[0](x, embedding)
        second = self.down[1](self.pool(first), embedding)
        b, c, h, w = second.shape
        rows = self.norm(second).view(b, c, h * w).transpose(1, 2)
        q, k, v = (part.view(b, h * w, 2, 8).transpose(1, 2) for part in self.qkv(rows).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        middle = second + self.proj(mixed).transpose(1, 2).reshape(b, c, h, w)
        x = self.up[0](torch.cat([middle, second], 1), embedding)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return Output(self.conv_out(F.silu(self.up[1](torch.cat([x, first], 1), embedding))))


def diffusion(one_line: OneLine) -> list[Tensor]:
    model = seeded(lambda: UNet().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for step in range(2):
        clean, eps = noise(4, 3, 8, 8, seed=step), noise(4, 3, 8, 8, seed=50 + step)
        timesteps = torch.randint(0, 100, (4,), generator=torch.Generator().manual_seed(step))
        alpha = (1 - timesteps.to(DOUBLE) / 100).view(-1, 1, 1, 1)
        loss = F.mse_loss(model(alpha.sqrt() * clean + (1 - alpha).sqrt() * eps, timesteps)["sample"], eps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_a_diffusion_unet(plan: str) -> None:
    check(diffusion, plan)
