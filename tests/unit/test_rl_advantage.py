"""Advantages: groups by id (L1), GRPO, RLOO, and GAE over trainable tokens only (L4)."""

import math

import numpy as np
import pytest
import torch

from longspan.errors import UserError
from longspan.rl.advantage import gae, group_members, grpo, grpo_unscaled, rloo

GROUPS = ["a"] * 4 + ["b"] * 3 + ["c"] * 4 + ["d"] + [None, None]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0, 1.0, 1.0, 0.0]


def expected_grpo(rewards):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-4) for r in rewards]


def test_l1_groups_are_found_by_id_in_any_order():
    shuffled = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(3)).tolist()
    found = grpo([REWARDS[i] for i in shuffled], [GROUPS[i] for i in shuffled])
    by_row = dict(zip(shuffled, found, strict=True))
    for rows in ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10]):
        assert [by_row[i] for i in rows] == pytest.approx(expected_grpo([REWARDS[i] for i in rows]), abs=1e-12)
    assert [by_row[i] for i in (11, 12, 13)] == [0.0, 0.0, 0.0]  # a group of one, and rows without a group


def test_l1_control_stride_four_gives_other_advantages():
    strided = [advantage for i in range(0, 8, 4) for advantage in expected_grpo(REWARDS[i : i + 4])]
    assert grpo(REWARDS, GROUPS)[:8] != pytest.approx(strided, abs=1e-3)


def test_group_members_keep_first_appearance():
    assert group_members(["x", None, "y", "x", None]) == [[0, 3], [1], [2], [4]]


def test_rloo_leaves_one_out():
    assert rloo([1.0, 0.0, 0.5], ["g"] * 3) == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])
    assert grpo_unscaled([1.0, 0.0, 0.5], ["g"] * 3) == pytest.approx([0.5, -0.5, 0.0])


def test_bad_rewards_are_named():
    with pytest.raises(UserError, match=r"row 1 .group 'b'. is nan"):
        grpo([0.0, float("nan")], ["a", "b"])
    with pytest.raises(UserError, match="2 rewards and 1 groups"):
        grpo([0.0, 1.0], ["a"])


@pytest.mark.parametrize("rule", [grpo, rloo, grpo_unscaled])
@pytest.mark.parametrize("made", [np.array, torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.float64), tuple])
def test_rewards_in_any_row_of_numbers(rule, made):
    """All rewards here are exact in fp32."""
    assert rule(made(REWARDS), GROUPS) == rule(REWARDS, GROUPS)
    rows = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert rule(made(REWARDS[:12]), np.array(rows)) == rule(REWARDS[:12], rows)


def test_rewards_that_are_no_row_are_named():
    with pytest.raises(UserError, match=r"rewards of shape \[2, 1\] are not one number a row"):
        grpo(torch.zeros(2, 1), ["a", "a"])
    with pytest.raises(UserError, match=r"groups=tensor.* must be an array or a sequence"):
        grpo([0.0, 1.0], torch.zeros(2))
    with pytest.raises(UserError, match=r"row 1 .group 'b'. is inf"):
        rloo(torch.tensor([0.0, math.inf]), ["a", "b"])


def plain_gae(rewards, values, gamma, lam):
    """The definition: sum over l of (gamma lam)^l delta_{t+l}."""
    count = len(rewards)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, count)) for t in range(count)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.0, 0.95), (1.0, 1.0)])
def test_l4_gae_equals_the_compressed_row(gamma, lam):
    random = torch.Generator().manual_seed(0)
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0.0])  # prompt, masked middle, masked tail
    values = torch.randn(len(mask), generator=random, dtype=torch.float64)
    rewards = torch.randn(len(mask), generator=random, dtype=torch.float64) * (mask > 0)
    advantage, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    kept = mask > 0
    wanted = plain_gae(rewards[kept].tolist(), values[kept].tolist(), gamma, lam)
    assert advantage[kept].tolist() == pytest.approx(wanted, abs=1e-12)
    assert torch.equal(advantage[~kept], torch.zeros(int((~kept).sum()), dtype=torch.float64))
    assert returns[kept].tolist() == pytest.approx((advantage + values)[kept].tolist(), abs=1e-12)


def test_l4_reward_on_a_masked_token_belongs_to_the_last_trained_one():
    mask, zero = torch.tensor([0, 1, 1, 0, 0, 0, 0, 0.0]), torch.zeros(8)
    on_tail, on_token = torch.zeros(8), torch.zeros(8)
    on_tail[7], on_token[2] = 1.0, 1.0
    for gamma in (0.0, 0.95):
        assert torch.equal(
            gae(on_tail, zero, mask, gamma=gamma, lam=0.95)[0], gae(on_token, zero, mask, gamma=gamma, lam=0.95)[0]
        )
    naive = plain_gae(
        on_tail.tolist(), zero.tolist(), 0.95, 1.0
    )  # the control: the recursion over masked tokens decays it
    assert naive[2] == pytest.approx(0.95**5)
    with pytest.raises(UserError, match="before the first trainable token"):
        gae(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([0.0, 1.0]), gamma=1.0, lam=1.0)
    assert not gae(torch.zeros(3), torch.ones(3), torch.zeros(3), gamma=1.0, lam=1.0)[0].any()
