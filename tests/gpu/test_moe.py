"""Experts on a GPU: torch's grouped matmul in bf16, and the engine's experts and router losses in fp32, on one GPU and
with the experts over two.

bf16 tolerance 5e-3 relative L2: inputs are exact in bf16, sums are fp32, results are rounded once (2^-9). fp32 1e-5.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Engine, EngineConfig, Objective, Sample, launch
from longspan.layout import parse_layout
from longspan.models.experts import _Grouped
from longspan.parity.cases import Case
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASE = Case("experts", "importance_sampling", {"moe_aux": 1.0, "moe_z": 0.1}, "sample")


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


def test_grouped_matmul() -> None:
    """Ragged runs, idle experts: outputs and gradients of one matmul an expert; idle gradients exactly 0."""
    torch.manual_seed(0)
    counts = torch.tensor([500, 0, 1, 1300, 7, 0, 240, 0], device="cuda")
    x, dout = (torch.randn(int(counts.sum()), n, device="cuda").bfloat16() for n in (256, 384))
    weight = torch.randn(8, 384, 256, device="cuda").bfloat16()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = _Grouped.apply(x, weight.transpose(1, 2), counts)
    out.backward(dout)
    runs = counts.tolist()
    wide_x, wide_w = (y.detach().double().requires_grad_() for y in (x, weight))
    expected = torch.cat([a @ w.T for a, w in zip(wide_x.split(runs), wide_w, strict=True)])
    expected.backward(dout.double())
    errors = relative(out, expected), relative(x.grad, wide_x.grad), relative(weight.grad, wide_w.grad)
    print(f"worst {max(errors):.1e}")
    assert max(errors) < 5e-3
    assert not weight.grad[counts == 0].any()


def train(model: str, layout: str, samples: list[Sample]) -> dict[str, Any]:
    """Per-sample terms, then the whole-batch form with the recorded routes."""
    engine = Engine.build(EngineConfig(model, parse_layout(layout), max_tokens_per_rank=64))
    metrics = engine.forward_backward(samples, CASE.objective(), CASE.normalise)
    found = {"metrics": metrics, "gradients": engine.gradients()}
    engine.clear_gradients()
    routes = [out.routed_experts for out in engine.forward(samples, ("routed_experts",))]
    replayed = [
        Sample(s.input_ids, s.target_ids, s.mask, {"routed_experts": r}) for s, r in zip(samples, routes, strict=True)
    ]
    whole = engine.forward_backward(replayed, Objective("cross_entropy", moe_aux=1.0, moe_over="batch"))
    return found | {"whole": whole["loss/moe_aux"]}


@pytest.mark.parametrize("model", ["tiny:qwen3_moe", "tiny:gpt_oss"])
@pytest.mark.parametrize("layout", ["dp1", "ep2", "cp2-gather-ep2"])
def test_engine_equals_plain_transformers(model: str, layout: str) -> None:
    ranks = parse_layout(layout).ranks
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    reference = Reference(model, dtype=torch.float64)
    samples = fill_fields(default_samples(reference), reference)
    truth = reference.run(samples, CASE)
    results = launch(train, model, layout, samples, ranks=ranks, timeout_s=300, device="cuda")
    for found in results:
        errors = [relative(found["gradients"][name], want) for name, want in truth.gradients.items()]
        errors += [abs(found["metrics"][name] / truth.metrics[name] - 1) for name in ("loss/moe_aux", "loss/moe_z")]
        print(f"{model} {layout}: {max(errors):.1e}")
        assert max(errors) < 1e-5
        assert abs(found["whole"] / results[0]["whole"] - 1) < 1e-6 and found["whole"] > 0.5
