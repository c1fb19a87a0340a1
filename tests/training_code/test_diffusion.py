"""Diffusion models in the shape of diffusers: a registered config, outputs registered without keys, a scheduler."""

from __future__ import annotations

import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import PlanError

from .running import DOUBLE, PLANS, OneLine, check, check_refused, noise, parameters, seeded


class FrozenDict(OrderedDict):
    """A config whose entries are attributes too, and can't be set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.__frozen = True

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen") and self.get(name) != value:
            raise RuntimeError("a config can't be changed")
        super().__setitem__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def register_to_config(init: Callable[..., None]) -> Callable[..., None]:
    """Keep what a model is made with."""

    @functools.wraps(init)
    def inner_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        signature = inspect.signature(init).bind(self, *args, **kwargs)
        signature.apply_defaults()
        self._internal_dict = FrozenDict(list(signature.arguments.items())[1:])

    return inner_init


class ModelMixin(nn.Module):
    """Attributes that a model does not have are looked for in its config."""

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("_internal_dict", {})
        if name in config and name not in self.__dict__:
            return config[name]
        return super().__getattr__(name)

    @property
    def config(self) -> FrozenDict:
        return self._internal_dict

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class BaseOutput(OrderedDict):
    """A dataclass, a dict and a tuple in one."""

    def __init_subclass__(cls) -> None:
        torch.utils._pytree.register_pytree_node(
            cls,
            torch.utils._pytree._dict_flatten,
            lambda values, context: cls(**torch.utils._pytree._dict_unflatten(values, context)),
        )

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            super().__setitem__(field.name, getattr(self, field.name))

    def __getitem__(self, k: Any) -> Any:
        return dict(self.items())[k] if isinstance(k, str) else tuple(self.values())[k]


@dataclass
class UNet2DOutput(BaseOutput):
    sample: Tensor


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


class UNet2DModel(ModelMixin):
    """Down, attention in the middle, up with skip connections, the step as sines and cosines."""

    @register_to_config
    def __init__(self, sample_size: int = 8, in_channels: int = 3, center_input_sample: bool = True) -> None:
        super().__init__()
        base = 8
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.conv_in = nn.Conv2d(in_channels, base, 3, padding=1)
        self.conv_out = nn.Conv2d(base, in_channels, 3, padding=1)
        self.down = nn.ModuleList([ResnetBlock(base, base), ResnetBlock(base, 16)])
        self.pool = nn.Conv2d(base, base, 3, stride=2, padding=1)
        self.norm, self.qkv, self.proj = nn.GroupNorm(2, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up = nn.ModuleList([ResnetBlock(32, base), ResnetBlock(16, base)])

    def forward(
        self, sample: Tensor, timestep: Tensor | float, return_dict: bool = True
    ) -> UNet2DOutput | tuple[Tensor, ...]:
        if self.config.center_input_sample:
            sample = 2 * sample - 1.0
        timesteps = timestep if torch.is_tensor(timestep) else torch.tensor([timestep], device=sample.device)
        timesteps = timesteps * torch.ones(sample.shape[0], dtype=timesteps.dtype, device=timesteps.device)
        half = torch.exp(-math.log(10000) * torch.arange(4, dtype=self.dtype) / 4)
        angles = timesteps[:, None].to(dtype=self.dtype) * half[None]
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
        x = self.conv_out(F.silu(self.up[1](torch.cat([x, first], 1), embedding)))
        return UNet2DOutput(sample=x) if return_dict else (x,)


class DDPMScheduler:
    """How much noise a step has, and the way back by one step."""

    def __init__(self, steps: int = 100) -> None:
        self.betas = torch.linspace(1e-4, 0.02, steps, dtype=DOUBLE)
        self.alphas_cumprod = torch.cumprod(1.0 - self.betas, dim=0)

    def add_noise(self, clean: Tensor, eps: Tensor, timesteps: Tensor) -> Tensor:
        alpha = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        return alpha.sqrt() * clean + (1 - alpha).sqrt() * eps

    def step(self, predicted: Tensor, t: int, sample: Tensor) -> Tensor:
        beta, alpha = self.betas[t], self.alphas_cumprod[t]
        return (sample - beta / (1 - alpha).sqrt() * predicted) / (1 - beta).sqrt()


def unet2d(one_line: OneLine, number: bool = True) -> list[Tensor]:
    """Random steps, clipping, a cosine schedule, then two steps of sampling, with the step as a number or a tensor."""
    model = seeded(lambda: UNet2DModel(sample_size=8).double())
    scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    model, optimizer = one_line(model, optimizer)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    seen: list[Tensor] = []
    for step in range(2):
        clean, eps = noise(4, 3, 8, 8, seed=step), noise(4, 3, model.config.sample_size, 8, seed=50 + step)
        timesteps = torch.randint(0, 100, (4,), generator=torch.Generator().manual_seed(step)).long()
        predicted = model(scheduler.add_noise(clean, eps, timesteps), timesteps, return_dict=False)[0]
        loss = F.mse_loss(predicted, eps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    model.eval()
    image = noise(2, model.in_channels, 8, 8, seed=99)
    with torch.no_grad():
        for t in (99, 98):
            image = scheduler.step(model(image, t if number else torch.full((2,), t)).sample, t, image)
    return [*seen, image, *parameters(model)]


@pytest.mark.parametrize("plan", PLANS)
def test_unet2d(plan: str) -> None:
    if plan == "pp=2":  # the embedding of a number is computed by each stage that adds it
        words = "embed.0.weight on device 1, and it is on device 0", "use a plan without stages"
        check_refused(unet2d, plan, PlanError, *words)
    check(lambda one_line: unet2d(one_line, number=plan != "pp=2"), plan)
