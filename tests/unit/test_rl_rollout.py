"""The embedded sampler's parts that need no engine: the draw, how ranks share batches, and rollouts as samples (L6,
L7, L10).
"""

import numpy as np
import pytest
import torch

from longspan.errors import UserError
from longspan.rl import Prompt, Rollout, answer_sample, exact_match, rollout_sample
from longspan.rl.gap import logprob_gap
from longspan.rl.numbers import merge_updates, reward_numbers
from longspan.rl.rollout import assign, cut, draw, uniforms
from longspan.rl.task import EpochOrder

EOS = 2


def test_draw_follows_the_distribution_at_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    count = 20000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for temperature, share in ((1.0, 0.6652), (0.5, 0.8668)):
        tokens, logprobs = draw(logits.expand(count, 3), grid, temperature)
        assert float((tokens == 0).double().mean()) == pytest.approx(share, abs=1e-4)
        assert float(logprobs[tokens == 0][0].exp()) == pytest.approx(share, abs=1e-4)
    assert float(draw(logits, grid[:1], 0.5)[1]) == pytest.approx(-0.143, abs=1e-3)  # F5: not -0.815


def test_draw_never_takes_an_impossible_token_and_greedy_takes_the_largest():
    logits = torch.tensor([[0.0, -torch.inf, 3.0, -torch.inf]])
    edges = torch.tensor([0.0, 0.2, 1.0, 0.999999])  # 1.0: what rounding may make of the largest draw
    assert set(draw(logits.expand(4, 4), edges, 1.0)[0].tolist()) <= {0, 2}
    tokens, logprobs = draw(logits, edges[:1], 0.0)
    assert tokens.tolist() == [2] and float(logprobs) == pytest.approx(-0.0486, abs=1e-4)


def test_random_numbers_depend_on_the_keys_alone():
    first = uniforms(1, 0, 17, 4, 3)
    assert torch.equal(first, uniforms(1, 0, 17, 4, 3))
    assert torch.equal(first, uniforms(1, 0, 17, 6, 5)[:4, :3])
    others = [uniforms(2, 0, 17, 4, 3), uniforms(1, 1, 17, 4, 3), uniforms(1, 0, 18, 4, 3)]
    assert all(not torch.equal(first, other) for other in others)


def test_batches_hold_one_length_and_every_prompt_once():
    lengths = [9, 12, 9, 9, 15, 12, 9, 9]
    batches = cut(lengths, 2)
    assert sorted(position for batch in batches for position in batch) == list(range(8))
    assert all(len({lengths[position] for position in batch}) == 1 and len(batch) <= 2 for batch in batches)
    shares = assign([float(len(batch)) for batch in batches], 3)
    assert sorted(batch for share in shares for batch in share) == list(range(len(batches)))


def test_l6_l7_l10_mask_comes_from_recorded_lengths():
    prompt = Prompt("p", (1, 5, 6), answer=(7, EOS))
    cut_short = rollout_sample(prompt, Rollout((7, 8), (-1.0, -2.0), False), advantage=0.5, temperature=1.0, group="p")
    assert cut_short.input_ids.tolist() == [1, 5, 6, 7] and cut_short.target_ids.tolist() == [5, 6, 7, 8]
    assert cut_short.mask.tolist() == [0, 0, 1, 1]  # no end token was added, nothing unsampled is trained
    assert cut_short.fields["old_logprob"].tolist() == [0, 0, -1, -2]
    assert cut_short.fields["advantage"].tolist() == [0, 0, 0.5, 0.5]
    twice = rollout_sample(
        prompt, Rollout((EOS, EOS, 7), (-1.0, -1.0, -1.0), False), advantage=1.0, temperature=0.7, group="p"
    )
    assert twice.mask.tolist() == [0, 0, 1, 1, 1]  # ids equal to the end (or pad) id inside a response are plain tokens
    assert twice.fields["temperature"].tolist() == pytest.approx([0.7] * 5)
    assert answer_sample(prompt).mask.sum() == 2
    with pytest.raises(UserError, match="prompt 'q' has no answer"):
        answer_sample(Prompt("q", (1, 2)))


def test_exact_match_needs_the_end_token():
    assert exact_match((7, EOS), (7, EOS)) == 1.0
    assert exact_match((7,), (7, EOS)) == exact_match((7, 7), (7, EOS)) == 0.0
    assert exact_match(torch.tensor([7, EOS]), np.array([7, EOS])) == 1.0
    assert exact_match(torch.tensor([7, 7]), [7, EOS]) == 0.0


def test_gap_percentiles():
    sampler = [torch.zeros(1000), torch.zeros(3)]
    trainer = [torch.arange(1000) / 1000.0, torch.tensor([50.0, 60.0, 70.0])]
    masks = [torch.ones(1000), torch.tensor([0.0, 0.0, 0.0])]
    gap = logprob_gap(sampler, trainer, masks)
    assert gap["gap/mean"] == pytest.approx(0.4995, abs=1e-6)
    assert gap["gap/p99"] == pytest.approx(0.989, abs=1e-6) and gap["gap/p99.9"] == pytest.approx(0.998, abs=1e-6)
    assert gap["gap/max"] == pytest.approx(0.999, abs=1e-6)
    assert gap["gap/share>0.5"] == pytest.approx(0.499)
    with pytest.raises(UserError, match="at least one trained token"):
        logprob_gap(sampler[1:], trainer[1:], masks[1:])


def test_epochs_visit_every_row_once():
    order = EpochOrder(5, seed=3)
    walk = [order[i] for i in range(15)]
    assert [sorted(walk[start : start + 5]) for start in (0, 5, 10)] == [list(range(5))] * 3
    assert walk[:5] != walk[5:10] or walk[5:10] != walk[10:]
    assert [EpochOrder(5, seed=3)[i] for i in reversed(range(15))] == walk[::-1]
    with pytest.raises(UserError, match="0 rows"):
        EpochOrder(0, seed=0)


def test_numbers_of_a_round():
    groups = [
        [Rollout((1, EOS), (0.0, 0.0), True), Rollout((1, 1), (0.0, 0.0), False)],
        [Rollout((EOS,), (0.0,), True)] * 2,
    ]
    numbers = reward_numbers([[1.0, 0.0], [0.0, 0.0]], groups)
    assert numbers["reward/mean"] == 0.25 and numbers["reward/mixed_groups"] == 0.5
    assert numbers["response/tokens_mean"] == 1.5 and numbers["response/finished"] == 0.75
    first = {"loss/ppo": 1.0, "tok/trained": 1.0, "time/a_s": 1.0, "mem/peak_gib": 3.0, "lr": 0.1}
    second = {"loss/ppo": 4.0, "tok/trained": 2.0, "time/a_s": 1.0, "mem/peak_gib": 2.0, "lr": 0.2}
    assert merge_updates([first]) == first
    merged = {"loss/ppo": 3.0, "tok/trained": 3.0, "time/a_s": 2.0, "mem/peak_gib": 3.0, "lr": 0.2}
    assert merge_updates([first, second]) == pytest.approx(merged)
