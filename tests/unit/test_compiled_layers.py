"""What compiled layers keep for backward: inputs under "selective", matrix products too under "none"; the numbers are eager's.

The partitioner is torch's own; its code generator is left out, which would take a minute here.
"""

from contextlib import nullcontext

import pytest
import torch
from partition_only import partition_only
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor import config as inductor_config
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from longspan import Engine, EngineConfig, Objective, Sample
from longspan.engine.fsdp import compiled
from longspan.engine.fsdp.compiled import KEEPS, backend_of, keeps_of

TOKENS, WIDTH, MLP = 64, 32, 96


class Piece(nn.Module):
    """A decoder layer after its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, MLP, bias=False), nn.Linear(WIDTH, MLP, bias=False)
        self.down = nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended)
        y = self.norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize(("policy", "wide"), [("selective", 0), ("none", 2)])
def test_layers_keep_what_the_policy_says(policy: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_fx", partition_only)
    torch._dynamo.reset()
    torch.manual_seed(0)
    piece = Piece().double()
    inputs = [torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    wanted = [*inputs, *piece.parameters()]
    expected = torch.autograd.grad(piece(*inputs).square().sum(), wanted)
    kept: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
        out = torch.compile(piece, backend=backend_of(policy, deterministic=False))(*inputs)
    found = torch.autograd.grad(out.square().sum(), wanted)
    assert kept.count((TOKENS, MLP)) == wide  # gate and up, never their product
    assert kept.count((TOKENS, WIDTH)) == 2  # x and attended; under "none" the sum in the place of x
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("default")  # dynamo looks at .grad of what is no leaf
@pytest.mark.parametrize("variants", [compiled.VARIANTS, 8])
def test_a_hybrid_model_is_compiled_for_all_lengths(variants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of layers share one `forward`: under dynamo's own limit of eight the second length would run uncompiled."""
    monkeypatch.setattr(compiled, "compile_fx", partition_only)
    monkeypatch.setattr(compiled, "VARIANTS", variants)
    torch._dynamo.reset()
    with dynamo_config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        engine = Engine.build(EngineConfig("tiny:qwen3_5", dtype="float64", compile=True, max_tokens_per_rank=128))
        with nullcontext() if variants > 8 else pytest.raises(FailOnRecompileLimitHit):
            for length in (20, 33, 47):
                ids = torch.arange(length + 1) % 90
                sample = Sample(ids[:-1], ids[1:], torch.ones(length))
                engine.forward([sample])
                engine.forward_backward([sample], Objective("cross_entropy"))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, True),
        ({"freeze": ("vision",)}, False),
        ({"freeze": ("vision", "merger")}, False),
        ({"freeze": ("language", "embeddings", "*attn*", "*patch_embed*", "*pos_embed*")}, True),
        ({"recompute": "full"}, False),
    ],
)
def test_a_tower_keeps_its_attention_where_it_runs_again(settings: dict[str, object], kept: bool) -> None:
    engine = Engine.build(EngineConfig("tiny:qwen3_vl", max_tokens_per_rank=64, **settings))
    assert engine._keep(Objective("cross_entropy")).tower == kept


def test_a_checkpoint_stands_where_layers_keep_nothing_by_themselves() -> None:
    def keeps(**settings: object) -> object:
        return keeps_of(EngineConfig(model="tiny:qwen3", **settings))

    assert keeps(compile=True) == KEEPS["selective"]
    assert keeps(compile=True, recompute="none") == KEEPS["none"]
    assert keeps(compile=True, recompute="full") is None
    assert keeps(compile=True, offload=("checkpoints",)) is None
    assert keeps(compile=False) is None


@pytest.mark.parametrize(("deterministic", "how"), [(False, compiled.TIMED), (True, compiled.FIXED)])
def test_tiles_are_timed_unless_they_must_be_the_same(deterministic, how, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []

    def watched(graph, inputs, config_patches):
        with inductor_config.patch(config_patches):  # a name that inductor does not know raises
            told.append(config_patches)
        return partition_only(graph, inputs, config_patches)

    monkeypatch.setattr(compiled, "compile_fx", watched)
    torch._dynamo.reset()
    settings = {"compile": True, "deterministic": deterministic, "max_tokens_per_rank": 64}
    engine = Engine.build(EngineConfig("tiny:qwen3", **settings))
    engine.forward([Sample(torch.arange(8), torch.arange(8), torch.ones(8))])
    assert told and all(each == how for each in told)
