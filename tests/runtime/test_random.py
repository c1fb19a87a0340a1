"""Who draws which mask, and that many ranks can agree with one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.layout import Axis, Block, Mesh, Shard
from shardwright.runtime.algorithms.random import ExactDropout, Randomness, seed_of
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Group, Groups
from tests.runtime.ranks import run_ranks

FUSED = Shard(axis="tp", blocks=(Block(3, 2, 2),))
UNEVEN = Shard(axis="dp", blocks=(Block(1, 5, 1),))


def axis(name: str, size: int, index: int) -> Group:
    """A place on an axis, without anybody on the other places."""
    return Group(axes=(name,), size=size, index=index, ranks=tuple(range(size)))


def mask(randomness: Randomness, *splits: tuple[int, Group, Shard | None], op: str = "drop") -> list[float]:
    return randomness.dropout(torch.ones(64), 0.5, op, splits).tolist()


def test_keys_are_the_same_in_every_process() -> None:
    assert seed_of((1, "drop", [("dp", 0)])) == 4163296068467369009


def test_a_mask_keeps_the_mean() -> None:
    y = Randomness().dropout(torch.ones(100_000), 0.2, "drop")
    assert set(y.tolist()) == {0.0, 1.25}
    assert abs(y.mean().item() - 1) < 0.01
    assert not Randomness().dropout(torch.ones(10), 1.0, "drop").any()


def test_masks_differ_by_seed_step_microbatch_op_and_place() -> None:
    dp = [axis("dp", 2, 0), axis("dp", 2, 1)]
    drawn = [
        mask(Randomness()),
        mask(Randomness(seed=1)),
        mask(Randomness(step=1)),
        mask(Randomness(microbatch=1, apart=True)),
        mask(Randomness(), op="other"),
        mask(Randomness(), (0, dp[0], None)),
        mask(Randomness(), (0, dp[1], None)),
        mask(Randomness(), (0, axis("tp", 2, 1), None)),
    ]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_same_key_draws_the_same_mask_whatever_was_drawn_between() -> None:
    randomness = Randomness()
    first = mask(randomness)
    randomness.advance()
    mask(randomness)
    with randomness.at(step=0, microbatch=0):
        assert mask(randomness) == first
    assert mask(randomness) != first


def test_evaluation_draws_nothing() -> None:
    x = torch.ones(3)
    assert Randomness().dropout(x, 0.5, "drop", training=False) is x
    assert Randomness().dropout(x, 0.0, "drop") is x


def shards(rank: int, x: Tensor) -> Tensor:
    groups = Groups(Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2))))
    dp, tp = groups["dp"], groups["tp"]
    mine = comm.shard(comm.shard(x, 0, dp, UNEVEN), 1, tp, FUSED)
    y = Randomness(seed=3, step=2, exact=True).dropout(mine, 0.4, "drop", [(0, dp, UNEVEN), (1, tp, FUSED)])
    return comm.all_gather(comm.all_gather(y, 1, tp, FUSED), 0, dp, UNEVEN)


def test_exact_shards_make_up_the_mask_of_one_device() -> None:
    x = torch.randn(5, 12)

    results = run_ranks(4, shards, x)

    expected = Randomness(seed=3, step=2, exact=True).dropout(x, 0.4, "drop")
    assert all(torch.equal(y, expected) for y in results)


def test_exact_shards_of_one_dim_cut_twice_and_in_time() -> None:
    exact = Randomness(exact=True)
    whole = exact.dropout(torch.ones(16), 0.5, "drop")

    results = [
        exact.dropout(torch.ones(4), 0.5, "drop", [(0, axis("dp", 2, d), None), (0, axis("time", 2, t), None)])
        for d in range(2)
        for t in range(2)
    ]

    assert torch.equal(torch.cat(results), whole)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.nothing = nn.Dropout(0.0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.nothing(self.drop(x)), 0.5, self.training)
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.attention(x, x, x)[0]
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1 if self.training else 0.0).squeeze(1)


NAMES = ["drop", "f", "mha", "mha_weights", "sdpa"]


def test_a_model_on_one_device_draws_the_named_masks_in_order() -> None:
    torch.manual_seed(0)
    net, x, randomness = Net(), torch.randn(2, 4, 8), Randomness(seed=5)

    with ExactDropout(randomness, NAMES) as mode:
        first, again = net(x), None
    with mode:
        again = net(x)
    randomness.advance()
    with mode:
        later = net(x)

    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    with ExactDropout(Randomness(seed=5), NAMES):
        y = net.drop(x)
    assert torch.equal(y, Randomness(seed=5, exact=True).dropout(x, 0.3, "drop"))


def test_without_dropout_the_model_is_untouched() -> None:
    net, x = Net().eval(), torch.randn(2, 4, 8)
    with ExactDropout(Randomness(), []):
        y = net(x)
    assert torch.equal(y, net(x))


def test_dropout_in_place() -> None:
    x = torch.ones(8)
    with ExactDropout(Randomness(), ["drop"]):
        y = F.dropout(x, 0.5, inplace=True)
    assert y is x
    assert torch.equal(x, Randomness(exact=True).dropout(torch.ones(8), 0.5, "drop"))


def test_a_call_without_a_name_and_a_kind_that_is_not_known_are_refused() -> None:
    with ExactDropout(Randomness(), []), pytest.raises(InputError, match="more than the 0 times"):
        F.dropout(torch.ones(3), 0.5)
    with ExactDropout(Randomness(), []), pytest.raises(InputError, match="dropout2d"):
        F.dropout2d(torch.ones(1, 3, 2, 2), 0.5)


@pytest.mark.parametrize("how", ["plain", "causal", "boolean", "added", "grouped", "scaled", "blind"])
def test_attention_without_a_mask_to_drop_is_torchs(how: str) -> None:
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    options: dict[str, object] = {
        "plain": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": torch.rand(5, 5) > 0.3},
        "added": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
        "grouped": {"enable_gqa": True},
        "scaled": {"scale": 0.3},
        "blind": {"attn_mask": torch.tensor([[False] * 5] + [[True] * 5] * 4)},
    }[how]
    if how == "grouped":
        k, v = k[:, :2], v[:, :2]

    tiny = 1e-300  # drops nothing, and takes our way
    y = Randomness().attention(q, k, v, dropout_p=tiny, op="sdpa", **options)

    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, **options), rtol=1e-10, atol=1e-10)
