"""Multi-token prediction on the megatron backend: what it keeps, and why megatron-core's own loss is not called."""

from types import SimpleNamespace

import pytest
import torch
from megatron_cases import engine_of, installed
from ragged import ragged

from longspan import Objective, launch


def kept_by_mtp():
    """The loss of a call, and what the head for tokens ahead still holds of the gathered embedding after it."""
    engine = engine_of("tiny:qwen3_5_moe_mtp", "tp2", mtp_steps=1, mtp_joint=True)
    metrics = engine.forward_backward(ragged(lengths=(13, 1, 22, 7)), Objective("reinforce", mtp=0.5))
    return metrics["loss/mtp"], engine.backend.chunks[0].tables.embed_tokens.weight


def theirs(ranks):
    """Gradient of an output layer under megatron-core's own `process_mtp_loss`, which it divides by each rank's tokens; ranks:
    lengths of the documents that each has. Summed over ranks and divided by all tokens, as its finalize does."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    settings = SimpleNamespace(
        mtp_num_layers=1, mtp_detach_heads=False, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=True
    )
    weight = torch.randn(97, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    total = 0.0
    for lengths in ranks:
        documents = [torch.Generator().manual_seed(length) for length in lengths]
        pairs = [
            (torch.randn(n, 1, 8, generator=g, dtype=torch.float64), n, g)
            for n, g in zip(lengths, documents, strict=True)
        ]
        hidden = torch.cat([x for x, _, _ in pairs])
        labels = torch.cat([torch.randint(0, 97, (n,), generator=g) for _, n, g in pairs])[None]
        mask = torch.cat([(torch.rand(n, generator=g) > 0.5).double() for _, n, g in pairs])[None]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        main = torch.zeros_like(hidden).requires_grad_()
        out = process_mtp_loss(
            torch.cat([main, hidden]),
            labels,
            mask,
            lambda states, weight, runtime_gather_output: (states @ weight.T, None),
            weight,
            None,
            False,
            lambda labels, logits: torch.nn.functional.cross_entropy(logits[:, 0], labels[0], reduction="none")[None],
            settings,
            packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends),
        )
        out.sum().backward()
        total += float(mask.sum())
    return weight.grad / total


def body():
    one, two = theirs([(13, 40)]), theirs([(13,), (40,)])
    return kept_by_mtp(), float((two - one).norm() / one.norm())


@pytest.fixture(scope="module")
def two_ranks():
    return launch(body, ranks=2, timeout_s=90)[0]


@installed
def test_the_gathered_embedding_goes_with_its_micro_step(two_ranks):
    loss, kept = two_ranks[0]
    assert loss > 0.0 and kept is None


@installed
def test_upstream_s_mtp_loss_depends_on_which_rank_has_which_tokens(two_ranks):
    """Two ranks with 13 and 40 tokens against one with both: its ratio of counts is per rank. Ours is exact at dp2, cp2 and
    tp2-sp, against the oracle (test_megatron.py)."""
    print(f"process_mtp_loss on two ranks against one: {two_ranks[1]:.3%}")
    assert two_ranks[1] > 1e-3
