"""More programs in the shape of public code: what a loop does beside calling the model and stepping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwright.errors import CaptureError, InputError, LoweringError

from .running import DOUBLE, PLANS, OneLine, check, check_refused, noise, parameters, seeded

ONE_MICROBATCH = {"pp=2": {"microbatches": 1}}  # for programs that see the whole batch


class Quantize(nn.Module):
    """A codebook that follows the data by moving averages; gradients go straight through."""

    def __init__(self, codebook_is_a_parameter: bool) -> None:
        super().__init__()
        embed = torch.randn(4, 8)
        if codebook_is_a_parameter:
            self.embed = nn.Parameter(embed, requires_grad=False)
        else:
            self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(8))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1).reshape(-1, 4)
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, ind = (-dist).max(1)
        onehot = F.one_hot(ind, 8).type(flat.dtype)
        q = F.embedding(ind.view(z.shape[0], *z.shape[2:]), self.embed.transpose(0, 1)).permute(0, 3, 1, 2)
        if self.training:
            self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
            self.embed_avg.data.mul_(0.9).add_(flat.transpose(0, 1) @ onehot, alpha=0.1)
            n = self.cluster_size.sum()
            smoothed = (self.cluster_size + 1e-5) / (n + 8e-5) * n
            self.embed.data.copy_(self.embed_avg / smoothed.unsqueeze(0))
        diff = (q.detach() - z).pow(2).mean()
        return z + (q - z).detach(), diff, ind


class VQVAE(nn.Module):
    def __init__(self, codebook_is_a_parameter: bool) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.quantize = Quantize(codebook_is_a_parameter)
        self.dec = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, diff, ind = self.quantize(self.enc(x))
        return self.dec(q), diff, ind


def vqvae(one_line: OneLine, codebook_is_a_parameter: bool = False) -> list[Tensor]:
    model = seeded(lambda: VQVAE(codebook_is_a_parameter).double())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for step in range(3):
        img = noise(4, 1, 8, 8, seed=step)
        model.zero_grad()
        out, latent_loss, _ = model(img)
        loss = F.mse_loss(out, img) + 0.25 * latent_loss
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    model.eval()
    with torch.no_grad():
        seen.append(model(img)[2].clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_a_vq_vae_with_a_codebook_by_averages(plan: str) -> None:
    if plan == "pp=2":
        check_refused(vqvae, plan, LoweringError, "quantize", "microbatches=1")
        words = "backward reached output [0] of a pipeline", 'backward="outside"'
        check_refused(vqvae, plan, InputError, *words, microbatches=1)
    check(vqvae, plan, **({"microbatches": 1, "backward": "outside"} if plan == "pp=2" else {}))


def test_a_codebook_that_is_a_parameter() -> None:
    words = "reads the parameter quantize.embed before forward writes to it", "make it a buffer"
    check_refused(lambda one_line: vqvae(one_line, True), "dp=2", CaptureError, *words)


def head(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, out))


def backbone() -> nn.Sequential:
    conv = nn.Conv2d(3, 8, 3, 2, 1)
    return nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(8, 8))


def regression_loss(x: Tensor, y: Tensor) -> Tensor:
    return 2 - 2 * (F.normalize(x, dim=1) * F.normalize(y, dim=1)).sum(-1)


def byol(one_line: OneLine, whole: bool = False) -> list[Tensor]:
    """An encoder and a predictor with one optimizer, and a momentum encoder that follows by a zip of parameters."""
    online, predictor = seeded(lambda: (backbone().double(), head(8, 8).double()))
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9)
    online, optimizer = one_line(online, optimizer)
    predictor, optimizer = one_line(predictor, optimizer)
    target = one_line(target)
    seen: list[Tensor] = []
    for step in range(3):
        view_1, view_2 = noise(4, 3, 8, 8, seed=step), noise(4, 3, 8, 8, seed=30 + step)
        predictions = predictor(online(view_1)), predictor(online(view_2))
        with torch.no_grad():
            targets = target(view_2), target(view_1)
        loss = sum(map(regression_loss, predictions, targets)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for param_q, param_k in zip(online.parameters(), target.parameters(), strict=True):
                followed = param_q.full_tensor() if whole and hasattr(param_q, "full_tensor") else param_q.data
                param_k.data = param_k.data * 0.9 + followed * 0.1
        seen.append(loss.detach().clone())
    return seen + parameters(online) + parameters(target) + parameters(predictor)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_byol(plan: str) -> None:
    if plan == "tp=2":  # the plan of a frozen model, which is not trained, is another one
        check_refused(byol, plan, InputError, "they are split in different ways", "p.full_tensor()")
    check(lambda one_line: byol(one_line, whole=plan == "tp=2"), plan, **ONE_MICROBATCH.get(plan, {}))


def simclr(one_line: OneLine) -> list[Tensor]:
    """Every image is compared with every other one of the batch, outside of the model."""
    model = seeded(lambda: backbone().double())
    optimizer = torch.optim.SGD(model.parameters(), 1e-1, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for step in range(3):
        images = torch.cat([noise(4, 3, 8, 8, seed=step), noise(4, 3, 8, 8, seed=30 + step)])
        features = F.normalize(model(images), dim=1)
        labels = torch.arange(4).repeat(2)
        same, mask = labels.unsqueeze(0) == labels.unsqueeze(1), torch.eye(8, dtype=torch.bool)
        similarity, same = (features @ features.T)[~mask].view(8, -1), same[~mask].view(8, -1)
        logits = torch.cat([similarity[same].view(8, -1), similarity[~same].view(8, -1)], dim=1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_simclr(plan: str) -> None:
    check(simclr, plan, **ONE_MICROBATCH.get(plan, {}))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)
        self.saved_actions: list[tuple[Tensor, Tensor]] = []

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(self.body(x))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return F.softmax(self.actor(x), dim=-1), self.critic(x)


def reinforce(one_line: OneLine) -> list[Tensor]:
    """One observation at a time, without a batch dim; one loss at the end of an episode over all calls of it."""
    model = seeded(lambda: ActorCritic().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    model, optimizer = one_line(model, optimizer)
    generator, seen = torch.Generator().manual_seed(0), []
    for episode in range(2):
        rewards = []
        for t in range(3):
            probs, value = model(noise(4, seed=10 * episode + t))
            action = torch.multinomial(probs.detach(), 1, generator=generator).squeeze(0)
            model.saved_actions.append((torch.distributions.Categorical(probs).log_prob(action), value))
            rewards.append(float(action))
        returns = torch.tensor(rewards, dtype=DOUBLE).flip(0).cumsum(0).flip(0)
        losses = []
        for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
            losses.append(-log_prob * (R - value.item()) + F.smooth_l1_loss(value, R.view(1)))
        optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        del model.saved_actions[:]
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_an_actor_critic_that_sees_one_state_at_a_time(plan: str) -> None:
    if plan == "pp=2":
        words = "body.0.weight (16, 4) has that dim too", "microbatches=1", "unbatched=[...]"
        check_refused(reinforce, plan, LoweringError, *words)
    check(reinforce, plan, **ONE_MICROBATCH.get(plan, {}))


def ppo(one_line: OneLine) -> list[Tensor]:
    """Two losses, each with its backward through one graph and its optimizer; shuffled parts of a rollout; a method."""
    model = seeded(lambda: ActorCritic().double())
    actor = torch.optim.Adam([*model.body.parameters(), *model.actor.parameters()], lr=1e-2, eps=1e-5)
    critic = torch.optim.RMSprop(model.critic.parameters(), lr=1e-2)
    model, (actor, critic) = one_line(model, [actor, critic])
    obs, actions, seen = noise(8, 4, seed=1), torch.arange(8) % 3, []
    with torch.no_grad():
        probs, values = model(obs)
        old, values = probs.log().gather(1, actions[:, None]).squeeze(1), values.clone().view(-1)
    returns = noise(8, seed=5)
    for epoch in range(2):
        for mb in torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).split(4):
            probs, value = model(obs[mb])
            ratio = (probs.log().gather(1, actions[mb][:, None]).squeeze(1) - old[mb]).exp()
            advantage = (returns - values)[mb]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            entropy = -(probs * probs.log()).sum(-1).mean()
            pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean() - 0.01 * entropy
            v_loss = 0.5 * (value.view(-1) - returns[mb]).pow(2).mean()
            actor.zero_grad()
            critic.zero_grad()
            pg_loss.backward(retain_graph=True)
            v_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            actor.step()
            critic.step()
            seen += [pg_loss.detach().clone(), v_loss.detach().clone()]
    with torch.no_grad():
        seen.append(model.get_value(obs[:4]).clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_ppo(plan: str) -> None:
    check(ppo, plan)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(out)


class PackedTagger(Tagger):
    def forward(self, packed: Any) -> Tensor:  # type: ignore[override]
        return self.out(self.rnn(packed)[1][-1])


LENGTHS = torch.tensor([6, 3, 5, 2])


def test_packed_sequences_are_refused() -> None:
    """Their sizes are data: inside of a model they can be kept out, as inputs they can't."""

    def inside(one_line: OneLine) -> list[Tensor]:
        return [one_line(seeded(lambda: Tagger().double()))(noise(4, 6, 6), LENGTHS)]

    def outside(one_line: OneLine) -> list[Tensor]:
        packed = pack_padded_sequence(noise(4, 6, 6), LENGTHS, batch_first=True, enforce_sorted=False)
        return [one_line(seeded(lambda: PackedTagger().double()))(packed)]

    check_refused(inside, "dp=2", CaptureError, "self.rnn(packed)", "sw.opaque(model.rnn)")
    check_refused(outside, "dp=2", InputError, "an input is a PackedSequence; pass the padded tensor and the lengths")


class Denoiser(nn.Module):
    """Layers of one size: a wrong pair of parameters has the right shape."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 8)
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.SiLU())))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x + self.time(t))


def ddpm(one_line: OneLine, way: str) -> list[Tensor]:
    """An average of the weights, by which samples are made: of a copy of the model, or of what knows about shards."""
    model = seeded(lambda: Denoiser().double())
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for step in range(3):
        x, eps = noise(4, 8, seed=step), noise(4, 8, seed=50 + step)
        t = torch.randint(0, 100, (4,), generator=torch.Generator().manual_seed(step))
        alpha = (1 - t.to(DOUBLE) / 100)[:, None]
        loss = F.mse_loss(model(alpha.sqrt() * x + (1 - alpha).sqrt() * eps, t), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
        with torch.no_grad():
            if way == "state dict":
                state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
                for key, value in average.state_dict().items():
                    value.mul_(0.9).add_(state[key], alpha=0.1)
            elif way == "zip":
                for p_average, p in zip(average.parameters(), model.parameters(), strict=False):
                    p_average.lerp_(p, 0.1)
            elif way == "zip of data":
                for p_average, p in zip(average.parameters(), model.parameters(), strict=False):
                    p_average.data.mul_(0.9).add_(p.data, alpha=0.1)
            else:
                own = list(model.parameters())
                torch._foreach_lerp_(list(average.parameters())[: len(own)], own, 0.1)
    with torch.no_grad():
        seen.append(average(noise(4, 8, seed=77), torch.arange(4)))
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_diffusion_with_an_average_of_the_weights(plan: str) -> None:
    check(lambda one_line: ddpm(one_line, "state dict"), plan)


@pytest.mark.parametrize("way", ["zip", "zip of data", "foreach"])
def test_a_zip_with_the_parameters_of_a_stage_is_refused(way: str) -> None:
    """A rank goes through those of its own stages; shapes would not tell."""
    words = "with a tensor that is not known to belong to it", "shardwright.ema.EMA(model)", "model.full_state_dict()"
    check_refused(lambda one_line: ddpm(one_line, way), "pp=2", InputError, *words)
    check(lambda one_line: ddpm(one_line, way), "dp=2")
