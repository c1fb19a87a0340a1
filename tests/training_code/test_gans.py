"""Adversaries: PyTorch's dcgan, and a WGAN with a gradient penalty."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import InputError, LoweringError

from .running import DOUBLE, FLAT, PLANS, OneLine, check, check_refused, noise, parameters, seeded, whole, written


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
            nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1, 1).squeeze(1)


def weights_init(m: nn.Module) -> None:
    if type(m).__name__.startswith("Conv"):
        nn.init.normal_(m.weight, 0.0, 0.2)
    elif type(m).__name__.startswith("BatchNorm"):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def dcgan(one_line: OneLine, flip: bool = False) -> list[Tensor]:
    """Two models with an optimizer each, trained in turns; the fake batch is used twice; samples of fixed noise.

    `flip`: some labels are flipped and all are smoothed, as people do it.
    """
    net_d, net_g = seeded(lambda: tuple(net().apply(weights_init).double() for net in (Discriminator, Generator)))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-2, betas=(0.5, 0.999))
    net_d, optimizer_d = one_line(net_d, optimizer_d)
    net_g, optimizer_g = one_line(net_g, optimizer_g)
    criterion, generator, seen = nn.BCELoss(), torch.Generator().manual_seed(7), []
    for step in range(2):
        net_d.zero_grad()
        label = torch.full((4,), 1.0, dtype=DOUBLE)
        if flip:
            label.sub_(0.3 * torch.rand(4, generator=generator, dtype=DOUBLE))
            label[torch.rand(4, generator=generator) < 0.3] = 0.0
        output = net_d(noise(4, 3, 8, 8, seed=step))
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        fake = net_g(noise(4, 4, 1, 1, seed=20 + step))
        label.fill_(0.0)
        output = net_d(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        errG = criterion(net_d(fake), label)
        errG.backward()
        optimizer_g.step()
        seen += [errD_real.detach() + errD_fake.detach(), errG.detach().clone(), torch.tensor(D_x, dtype=DOUBLE)]
    seen.append(net_g(noise(2, 4, 1, 1, seed=90)).detach().clone())  # in train mode, as the example has it
    seen += [value for _, value in sorted(written(whole(net_g)).items())]
    return seen + parameters(net_d) + parameters(net_g)


@pytest.mark.parametrize("plan", PLANS)
def test_dcgan(plan: str) -> None:
    if plan == "pp=2":
        check_refused(dcgan, plan, LoweringError, "batch_norm", "microbatches=1", 'semantics="local"')
    check(dcgan, plan, **({"microbatches": 1} if plan == "pp=2" else {}))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_dcgan_with_flipped_labels(plan: str) -> None:
    check(lambda one_line: dcgan(one_line, flip=True), plan)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 4, 4, 2, 1), nn.Linear(64, 16), nn.Linear(16, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(x), 0.2).flatten(1)
        return self.score(self.down(torch.tanh(self.up(x))).sigmoid()).view(-1)


def calc_gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, seed: int) -> Tensor:
    alpha = torch.rand(4, 1, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(interpolates)
    gradients = torch.autograd.grad(
        outputs=scores, inputs=interpolates, grad_outputs=torch.ones_like(scores), create_graph=True,
        retain_graph=True, only_inputs=True,
    )[0]  # fmt: skip
    return ((gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2).mean() * 10


def wgan_gp(one_line: OneLine) -> list[Tensor]:
    """The critic trains twice as often, by three backwards into one gradient, and is frozen while the other trains."""
    critic, generator = seeded(lambda: (Critic().double(), Generator().double()))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    critic, optimizer_d = one_line(critic, optimizer_d)
    generator, optimizer_g = one_line(generator, optimizer_g)
    values = torch.tensor(1.0, dtype=DOUBLE)
    mone, seen = values * -1, []
    for iteration in range(2):
        for p in critic.parameters():
            p.requires_grad = True
        for step in range(2):
            seed = 10 * iteration + step
            critic.zero_grad()
            real = noise(4, 3, 8, 8, seed=seed)
            D_real = critic(real).mean()
            D_real.backward(mone)
            with torch.no_grad():
                fake = generator(noise(4, 4, 1, 1, seed=30 + seed))
            D_fake = critic(fake).mean()
            D_fake.backward(values)
            penalty = calc_gradient_penalty(critic, real, fake, seed)
            penalty.backward()
            optimizer_d.step()
            seen += [D_real.detach().clone(), D_fake.detach().clone(), penalty.detach().clone()]
        for p in critic.parameters():
            p.requires_grad = False
        generator.zero_grad()
        G = critic(generator(noise(4, 4, 1, 1, seed=60 + iteration))).mean()
        G.backward(mone)
        optimizer_g.step()
        seen.append(-G.detach())
    return seen + parameters(critic) + parameters(generator)


@pytest.mark.parametrize("plan", FLAT)
def test_wgan_gp(plan: str) -> None:
    check(wgan_gp, plan)


def test_a_penalty_on_gradients_does_not_pass_through_a_pipeline() -> None:
    words = "double backward is not supported by its schedule", "use a plan without pp"
    check_refused(wgan_gp, "pp=2", InputError, *words, microbatches=1)
