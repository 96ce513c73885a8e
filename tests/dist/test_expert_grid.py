"""Experts at ep 1, 2 and 4 with cp 1 and 2, and cp 4, through the engine, on four ranks, against plain transformers on unpacked
samples in fp64: log-probs, the loss, the routers' losses and every parameter's gradient.

Control: the experts' gradients divided by the two ranks that hold the same ones.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ragged import RULE, train
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from longspan import Engine, EngineConfig, Sample, launch
from longspan.layout import parse_layout
from longspan.parity.cases import Case
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

CASE = Case("experts", "importance_sampling", {"moe_aux": 1.0, "moe_z": 0.1}, **RULE)
LAYOUTS = (
    "dp4", "dp4-ep2", "dp4-ep4",
    "dp2-cp2-ulysses", "dp2-cp2-ring-ep2", "dp2-cp2-gather-ep4",
    "cp4-ulysses-ep2", "cp4-hybrid-ep4",
)  # fmt: skip
FAULT = "dp2-cp2-ring-ep2"
TOLERANCE = 1e-10


def run(model: str, layout: str, samples: Sequence[Sample], fault: bool = False) -> dict[str, Any]:
    config = EngineConfig(model, parse_layout(layout), dtype="float64", max_tokens_per_rank=48)
    engine = Engine.build(config)
    for module in engine.adapter.model.modules() if fault else ():
        if isinstance(module, FSDPModule) and type(module).__name__.endswith("Experts"):
            module.set_gradient_divide_factor(2.0)
    logprob = [out.logprob for out in engine.forward(samples)]
    return {"logprob": logprob, "metrics": train(engine, samples, CASE), "gradients": engine.gradients()}


def everything(model: str, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [*(run(model, layout, samples) for layout in LAYOUTS), run(model, FAULT, samples, fault=True)]


def worst(found: dict[str, Any], logprob: Sequence[Tensor], metrics: dict[str, float], gradients: Any) -> float:
    errors = [float((a - b).abs().max()) for a, b in zip(found["logprob"], logprob, strict=True)]
    errors += [abs(found["metrics"][name] - metrics[name]) for name in metrics if name.startswith("loss/")]
    assert found["gradients"].keys() == gradients.keys()
    for name, want in gradients.items():
        errors.append(float((found["gradients"][name] - want).norm() / want.norm().clamp(min=1e-30)))
    return float(torch.tensor(errors, dtype=torch.float64).max())  # a NaN stays one


@pytest.mark.parametrize("model", ["tiny:qwen3_moe", "tiny:gpt_oss"])
def test_experts_at_every_ep_and_cp(model: str) -> None:
    reference = Reference(model, dtype=torch.float64)
    samples = fill_fields(default_samples(reference), reference)
    with torch.no_grad():
        logprob = [reference.outputs(sample).logprob for sample in samples]
    truth = reference.run(samples, CASE)
    ranks = launch(everything, model, samples, ranks=4, timeout_s=150)
    for found in ranks:
        for layout, result in zip(LAYOUTS, found[:-1], strict=True):
            error = worst(result, logprob, truth.metrics, truth.gradients)
            print(f"{model} {layout}: {error:.1e}")
            assert error < TOLERANCE, layout
        assert worst(found[-1], logprob, truth.metrics, truth.gradients) > 0.1
