"""The promise: under every layout every log-prob, gradient, metric and weight is the oracle's (DESIGN.md's table).

All losses, terms and rules on text; on the vision-language model one case of each kind, with images on the shard edges.
"""

from dataclasses import replace

import pytest
import torch

from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.parity.cases import default_cases
from longspan.parity.cells import Cell
from longspan.parity.checks import Plan, Truth, check_layout
from longspan.parity.compare import Request, compare, prepare
from longspan.parity.reference import Reference

FEW = ("ppo", "gspo", "distill_topk", "value_clip", "kl_k3", "entropy", "together", "ppo_constant")
VISION = ("gspo", "distill_topk", "together", "ppo_constant")
TWO = ("cp2-ulysses,cp2-ring", "cp2-gather,dp2")
MORE = ("cp3-ring", "cp4-hybrid,dp2-cp2")
# What stands out in each family: windows, sinks, routers, recurrent state with and without images.
FAMILIES = {
    "qwen2": "cp2-ulysses",
    "mistral": "cp2-ring",
    "gpt_oss": "cp2-gather",
    "qwen3_moe": "cp2-ring",
    "qwen3_5": "cp2-ring",
    "qwen3_5_vl": "cp2-gather",
}


def failures(cells: list[Cell]) -> list[str]:
    return [f"{c.layout} {c.check} [{c.case}] {c.figure:.3g} > {c.limit:.3g} {c.where}" for c in cells if not c.passed]


def request(model: str, layouts: str, cases: tuple[str, ...] | None, **settings: object) -> Request:
    chosen = None if cases is None else [case for case in default_cases(value_head=True) if case.name in cases]
    named = {name: parse_layout(name) for name in layouts.split(",")}
    return Request(f"tiny:{model}", named, cases=chosen, device="cpu", **settings)


@pytest.mark.parametrize("layouts", [*TWO, *MORE])
def test_text_numbers_do_not_depend_on_the_layout(layouts: str) -> None:
    cells = compare(request("qwen3", layouts, None if layouts in TWO else FEW)).cells
    assert not failures(cells)
    assert {cell.check for cell in cells} >= {
        "start",
        "logprob",
        "gradient",
        "metrics",
        "calls",
        "leak",
        "weights",
        "ranks",
    }


@pytest.mark.parametrize("layouts", [*TWO, *MORE])
def test_vision_numbers_do_not_depend_on_the_layout(layouts: str) -> None:
    assert not failures(compare(request("qwen3_vl", layouts, VISION)).cells)


def test_fp32_holds_against_unmodified_hf() -> None:
    """Nothing of ours in the oracle: HF's eager attention, fp32, 1e-5."""
    assert not failures(compare(request("qwen3", "cp2-ring,cp2-ulysses", ("ppo", "together"), dtype="float32")).cells)


def _families(jobs: list[tuple[str, Plan, Truth]]) -> list[tuple[list[Cell], str]]:
    """In each rank: one check a family."""
    out = []
    for name, plan, truth in jobs:
        findings = check_layout(name, plan, truth, compares=world().rank == 0)
        out.append((findings.cells, findings.digest.hexdigest()))
    return out


def test_other_families_keep_their_numbers() -> None:
    """Windows (D5), sinks, routers (I1), recurrent state (D8) and its convolution (B10) over two ranks."""
    jobs = []
    for family, layout in FAMILIES.items():
        own = request(family, layout, ("together", "gspo"), checks=("logprob", "gradient", "leak"))
        reference = Reference(own.model, dtype=torch.float64, value_head=True)
        plan, truth = prepare(own, reference)
        config = replace(plan.config, layout=own.layouts[layout])
        jobs.append((f"{family} {layout}", replace(plan, config=config, probes=plan.probes[:1]), truth))
    results = launch(_families, jobs, ranks=2, timeout_s=120, device="cpu")
    for (cells, digest), (_, other) in zip(*results, strict=True):
        assert not failures(cells)
        assert digest == other, f"{cells[0].layout}: ranks were told different numbers"
