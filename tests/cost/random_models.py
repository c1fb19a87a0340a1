"""Random small models: DAGs of ops of all families, in layers, with values and weights that are used several times."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 8, 16, 32, 4, 64


class RandomStep(nn.Module):
    """One of `FAMILIES` with drawn details: makes a value of x, the value before it, and y, an earlier one."""

    def __init__(self, draw: random.Random, tied: nn.Linear) -> None:
        super().__init__()
        self.family, self.early = draw.choice(FAMILIES), draw.random() < 0.3
        self.coin, self.picked = draw.random() < 0.5, draw.randrange(12)
        self.wide = 2 * WIDTH if self.coin else WIDTH
        sizes = {
            "linear": ((WIDTH, self.wide), (self.wide, WIDTH)),
            "gate": ((WIDTH, 2 * WIDTH),),
            "attention": ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH)),
        }.get(self.family, ())
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=draw.random() < 0.5) for a, b in sizes)
        if self.family == "shared_weight":
            self.tied = tied
        elif self.family == "norm":
            self.layer = nn.LayerNorm(WIDTH) if self.coin else nn.RMSNorm(WIDTH)
        elif self.family == "convolution":
            self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=self.coin)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        built: Tensor = getattr(self, self.family)(x, y)
        return built

    def linear(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linears[1](F.gelu(self.linears[0](x)))

    def shared_weight(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tied(x)

    def elementwise(self, x: Tensor, y: Tensor) -> Tensor:
        functions = (torch.tanh, torch.sigmoid, F.relu, F.silu, F.gelu, torch.neg, torch.square)
        return functions[self.picked % len(functions)](x)

    def two_values(self, x: Tensor, y: Tensor) -> Tensor:
        return (torch.add, torch.mul, torch.sub)[self.picked % 3](x, y)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.linears[0](x).chunk(2, -1)
        return F.silu(a) * b

    def norm(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x)

    def own_norm(self, x: Tensor, y: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.0)

    def views(self, x: Tensor, y: Tensor) -> Tensor:
        heads = torch.tanh(_heads(x)) if self.coin else F.relu(_heads(x))
        return heads.transpose(1, 2).reshape(-1, LENGTH, WIDTH)

    def reduction(self, x: Tensor, y: Tensor) -> Tensor:
        return y * x.mean(1 if self.coin else 2, keepdim=True)

    def softmax(self, x: Tensor, y: Tensor) -> Tensor:
        return x.softmax(-1)

    def attention(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = map(_heads, self.linears[0](x).split(WIDTH, 2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.coin)
        return self.linears[1](heads.transpose(1, 2).reshape(-1, LENGTH, WIDTH))

    def convolution(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)

    def dropout(self, x: Tensor, y: Tensor) -> Tensor:
        return F.dropout(x, 0.25, self.training)


FAMILIES = (
    "linear", "shared_weight", "elementwise", "two_values", "gate", "norm", "own_norm", "views", "reduction",
    "softmax", "attention", "convolution", "dropout",
)  # fmt: skip


def _heads(x: Tensor) -> Tensor:
    return x.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)


class RandomBlock(nn.Module):
    """A layer of random steps, around which its input goes on."""

    def __init__(self, draw: random.Random, steps: int, tied: nn.Linear) -> None:
        super().__init__()
        self.steps = nn.ModuleList(RandomStep(draw, tied) for _ in range(steps))

    def forward(self, x: Tensor) -> Tensor:
        values = [x, x]
        for step in self.steps:
            values.append(step(values[-1], values[0] if step.early else values[-2]))
        return values[-1] + x


class RandomModel(nn.Module):
    """Embedded ids, or numbers; a few layers; a loss over the vocabulary whose head may be tied, or a mean square."""

    def __init__(self, seed: int, *, layers: int = 2, steps: int = 5) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.classes = draw.random() < 0.6
        if self.classes:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            if draw.random() < 0.5:
                self.head.weight = self.embed.weight
        tied = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(RandomBlock(draw, draw.randint(1, steps), tied) for _ in range(layers))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.embed(x) if self.classes else x)
        for block in self.blocks:
            x = block(x)
        if self.classes:
            return F.cross_entropy(self.head(x).view(-1, VOCABULARY), labels.view(-1))
        return F.mse_loss(x, labels)


def random_case(seed: int, *, batch: int = BATCH, **sizes: Any) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A model with a batch for it."""
    torch.manual_seed(seed)
    module = RandomModel(seed, **sizes).train()
    if module.classes:
        return module, tuple(torch.randint(VOCABULARY, (batch, LENGTH)) for _ in range(2)), {}
    return module, tuple(torch.randn(batch, LENGTH, WIDTH) for _ in range(2)), {}
