"""Nets without attention, one idea each, with the loss inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.short = nn.Sequential()
        if stride != 1 or inner != outer:
            self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.layer1 = Residual(channels, channels, stride=1)
        self.layer2 = Residual(channels, 2 * channels, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor, label: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(images)))
        x = self.layer2(self.layer1(x))
        return F.cross_entropy(self.head(self.pool(x).flatten(1)), label)


class UNet(nn.Module):
    """Two levels down and up; each way up reads the way down by a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.enter = nn.Conv2d(2, c, 3, padding=1)
        self.down1 = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * c, 4 * c, 3, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
        self.mix2 = nn.Conv2d(4 * c, 2 * c, 3, padding=1)
        self.up1 = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(2 * c, c, 3, padding=1))
        self.mix1 = nn.Conv2d(2 * c, c, 3, padding=1)
        self.leave = nn.Conv2d(c, 2, 1)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x0 = F.silu(self.enter(images))
        x1 = F.silu(self.down1(x0))
        x2 = F.silu(self.down2(x1))
        y1 = F.silu(self.mix2(torch.cat([self.up2(x2), x1], dim=1)))
        y0 = F.silu(self.mix1(torch.cat([self.up1(y1), x0], dim=1)))
        return F.mse_loss(self.leave(y0), target)


class Repeated(nn.Module):
    """One block applied several times: its gradient is the sum over its uses."""

    def __init__(self, d: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.mse_loss(x, y)


class Masked(nn.Module):
    """Blocks that all look at a mask of whole numbers which the first layer makes: it has no gradient, and goes far."""

    def __init__(self, d: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(d, d)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x).tanh()
        mask = (x > 0).to(torch.int64)
        for block in self.blocks:
            x = x + block(x).tanh() * mask
        return F.mse_loss(x, y)


class Contrastive(nn.Module):
    """Two towers; each row of one meets each row of the other, so the batch can't be cut without communicating."""

    def __init__(self, left: int, right: int, d: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(left, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.right = nn.Sequential(nn.Linear(right, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.temperature = 0.1

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a = F.normalize(self.left(left), dim=-1)
        b = F.normalize(self.right(right), dim=-1)
        logits = a @ b.T / self.temperature
        label = torch.arange(logits.size(0), device=logits.device)
        return (F.cross_entropy(logits, label) + F.cross_entropy(logits.T, label)) / 2


class Regularized(nn.Module):
    """A term that depends on the weights only: under data parallelism it must count once."""

    def __init__(self, d: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.down(torch.tanh(self.up(x))), y)
        for weight in (self.up.weight, self.down.weight):
            loss = loss + 0.01 * (weight * weight).sum()
        return loss


class LowRank(nn.Module):
    """A frozen linear with a trainable low-rank term."""

    def __init__(self, d: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(d, out).requires_grad_(False)
        self.a = nn.Linear(d, rank, bias=False)
        self.b = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


class LoRA(nn.Module):
    def __init__(self, d: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.up = LowRank(d, hidden, rank)
        self.down = LowRank(hidden, d, rank)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


class SwiGLU(nn.Module):
    """Gate and up in one weight, whose rows are (2 f)."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.gate_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return F.mse_loss(x + self.down(F.silu(gate) * up), y)


class AutocastMLP(nn.Module):
    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.down(F.gelu(self.up(x)))
        return F.mse_loss(x.to(y.dtype), y)


class ScaleGradient(torch.autograd.Function):
    """The identity, whose backward doubles: no trace of the forward alone can know it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


class CustomBackward(nn.Module):
    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(ScaleGradient.apply(F.gelu(self.up(x)))), y)


class Exact(nn.Module):
    """Whole numbers, so that nothing is rounded in bfloat16 as long as the weights stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        signs = [torch.randint(0, 2, (4, 4), generator=generator) * 2.0 - 1 for _ in range(2)]
        self.up, self.down = (nn.Parameter(sign) for sign in signs)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.up).relu() @ self.down).float().sum()


SIGNS = torch.tensor([[1.0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, -1, 0, 0]])  # for Exact
RATE = 2.0**-16  # of steps of Exact: three don't show in bfloat16
