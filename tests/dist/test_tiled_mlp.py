"""MLPs run in tiles give the oracle's numbers: fp64 to 1e-12, with and without recomputation, compilation and frozen weights.

Only weight gradients are sums over tiles. Control: a tile that is left out of them is seen. In bf16 the tiles' weight
gradients add up in fp32: the error against fp64 stays that of the whole MLP.
"""

from fnmatch import fnmatch

import pytest
import torch
from ragged import RULE, ragged, train, truth, worst
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from longspan import Engine, EngineConfig, Layout
from longspan.engine.fsdp import compiled, tiled_mlp
from longspan.engine.fsdp.tiled_mlp import TiledMLP
from longspan.errors import UserError
from longspan.launch import launch
from longspan.models.tiny import tiny
from longspan.parity.cases import Case

TOLERANCE = 1e-12  # fp64, another order of the sums over tokens
CASE = Case("ppo", "ppo", {"clip": 0.2}, **RULE)


def gradients(mlp_tile: int, settings: dict[str, object]) -> tuple[dict[str, Tensor], int]:
    compiled.compile_fx = lookup_backend("aot_eager")  # traced and partitioned as always; C++ takes a minute
    base = {"model": "tiny:qwen3", "dtype": "float64", "max_tokens_per_rank": 40, "mlp_tile": mlp_tile}
    engine = Engine.build(EngineConfig(**{**base, **settings}))
    metrics = train(engine, ragged(), CASE)
    tiled = sum(isinstance(module, TiledMLP) for module in engine.backend.policy.modules())
    return engine.gradients() | {"loss": torch.tensor(metrics["loss/total"], dtype=torch.float64)}, tiled


def oracle(settings: dict[str, object]) -> dict[str, Tensor]:
    """Of what is not frozen."""
    found, freeze = truth(str(settings.get("model", "tiny:qwen3")), ragged(), CASE), settings.get("freeze", ())
    kept = {name: value for name, value in found.gradients.items() if not any(fnmatch(name, part) for part in freeze)}
    return kept | {"loss": torch.tensor(found.metrics["loss/total"], dtype=torch.float64)}


SETTINGS = [
    {"recompute": "none", "layout": Layout(dp=2)},
    {"recompute": "selective", "layout": Layout(cp=2)},
    {"recompute": "full", "freeze": ("*up_proj*", "*gate_proj*"), "layout": Layout(cp=3, mixer="ring")},
    {"recompute": "full", "compile": True},
    {"recompute": "full", "model": "tiny:qwen3_5"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values()))[:40])
def test_tiles_change_no_number(settings: dict[str, object]) -> None:
    ranks = settings.get("layout", Layout()).ranks
    found, tiled = launch(gradients, 7, settings, ranks=ranks)[0]
    assert tiled == (3 if "model" in settings else 2)
    assert worst(found, oracle(settings)) < TOLERANCE


def mlp_and_input(dtype: torch.dtype) -> tuple[TiledMLP, Tensor, Tensor]:
    torch.manual_seed(0)
    mlp = TiledMLP(Qwen3MLP(tiny("qwen3")), tile=16).to(dtype)
    x, dout = torch.randn(2, 1, 500, 32).bfloat16().to(dtype)
    return mlp, x.requires_grad_(), dout


def errors(dtype: torch.dtype, *, whole: bool) -> list[float]:
    """Relative error of dx and the weight gradients against fp64."""
    exact, x64, dout64 = mlp_and_input(torch.float64)
    mlp, x, dout = mlp_and_input(dtype)
    mlp.load_state_dict(exact.state_dict())
    exact.load_state_dict(mlp.state_dict())  # rounded alike
    wanted = torch.autograd.grad(exact.whole(x64), [x64, *exact.parameters()], dout64)
    found = torch.autograd.grad((mlp.whole if whole else mlp)(x), [x, *mlp.parameters()], dout)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def test_weight_gradients_of_tiles_add_up_in_fp32() -> None:
    tiled, whole = errors(torch.bfloat16, whole=False), errors(torch.bfloat16, whole=True)
    assert all(a <= 1.2 * b for a, b in zip(tiled, whole, strict=True)), (tiled, whole)
    assert max(errors(torch.float64, whole=False)) < TOLERANCE


def test_a_lost_tile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = TiledMLP.tiles
    monkeypatch.setattr(tiled_mlp.TiledMLP, "tiles", lambda self, tokens: list(tiles(self, tokens))[:-1])
    assert max(errors(torch.float64, whole=False)[1:]) > 1e-3


@pytest.mark.parametrize(
    "settings", [{"mlp_tile": -1}, {"mlp_tile": 8, "backend": "megatron"}, {"mlp_tile": 8, "lora": {"a": None}}]
)
def test_tiles_that_cannot_be_honoured_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match="mlp_tile="):
        EngineConfig(model="tiny:qwen3", **settings)


def test_a_model_without_a_gated_mlp_is_refused() -> None:
    with pytest.raises(UserError, match="has no gated MLP"):
        Engine.build(EngineConfig(model="tiny:phi3", mlp_tile=8))
