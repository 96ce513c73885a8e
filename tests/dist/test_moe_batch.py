"""The routers' losses one by one at 1, 2, 4 and 8 micro-steps and over ranks, per sample and over the whole batch, fp64.

The main loss is 0, so every gradient is the term's own. Oracle: the formulas on plain transformers' router logits of
unpacked samples. Controls: the other definition, and shares counted over a part of the batch.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from longspan import SGD, Engine, EngineConfig, Objective, Sample, launch
from longspan.layout import parse_layout
from longspan.parity import formulas
from longspan.parity.oracle_routers import RouterLog
from longspan.parity.reference import Reference

MODEL = "tiny:qwen3_moe"
EVEN = (12, 9, 11, 10, 12, 9, 11, 10)  # fill micro-steps
RAGGED = (13, 1, 40, 7, 29, 3)
BUDGETS = {1: 84, 2: 42, 4: 21, 8: 12}  # micro-steps -> tokens
TERMS = [(term, over) for term in ("moe_aux", "moe_z") for over in ("sample", "batch")]
LAYOUTS = ("cp2-ulysses", "cp3-gather", "dp2-cp2-ring-ep2")
TOLERANCE = 1e-10


def nothing(out: Any, fields: Any) -> Tensor:
    return 0 * out.logprob


def samples(routes: Sequence[Tensor] | None = None, lengths: Sequence[int] = EVEN) -> list[Sample]:
    """Holes in the masks; the fourth trains nothing, so its tokens count nowhere."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > 0.4).float() * (number != 3)
        fields = {} if routes is None else {"routed_experts": routes[number]}
        found.append(Sample(ids[:-1], ids[1:], mask, fields))
    return found


def build(layout: str, budget: int, **settings: Any) -> Engine:
    settings = {"model": MODEL} | settings
    return Engine.build(
        EngineConfig(layout=parse_layout(layout), dtype="float64", max_tokens_per_rank=budget, **settings)
    )


def recorded(engine: Engine, lengths: Sequence[int] = EVEN) -> list[Sample]:
    outputs = engine.forward(samples(lengths=lengths), ("routed_experts",))
    return samples([out.routed_experts for out in outputs], lengths)


def train(engine: Engine, batch: Sequence[Sample], term: str, over: str, rule: str) -> dict[str, Any]:
    objective = Objective(nothing, fields=(), uses=(), moe_over=over, **{term: 0.7})
    metrics = engine.forward_backward(batch, objective, normalise=rule)
    found = {"loss": metrics[f"loss/{term}"], "steps": metrics["plan/micro_steps"], "gradients": engine.gradients()}
    engine.clear_gradients()
    return found


def every_term(
    layout: str,
    budgets: Sequence[int],
    rule: str,
    model: str,
    backend: str = "fsdp",
    lengths: Sequence[int] = EVEN,
) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {}
    for budget in budgets:
        engine = build(layout, budget, model=model, backend=backend)
        batch = recorded(engine, lengths)
        for term, over in TERMS:
            found[budget, term, over] = train(engine, batch, term, over, rule)
        engine._shares = lambda batch, weights, right=engine._shares: right(batch[:4], weights[:4])
        found[budget, "fault"] = train(engine, batch, "moe_aux", "batch", rule)
    return found


def oracle(rule: str, model: str = MODEL, lengths: Sequence[int] = EVEN) -> dict[tuple[str, str], dict[str, Any]]:
    """(term, over) -> loss and gradients, written from the formulas."""
    reference, batch = Reference(model, dtype=torch.float64), samples(lengths=lengths)
    weights = [float(w.sum()) for w in formulas.token_weights([s.mask.double() for s in batch], rule)]
    logs, alone = [], []
    for sample in batch:
        with RouterLog(reference.model) as log:
            reference.outputs(sample)
        logs.append(log.seen)
        alone.append(log.losses())
    counted = [seen for seen, weight in zip(logs, weights, strict=True) if weight > 0]
    whole = RouterLog(reference.model)  # the batch as one sample: its formulas on all tokens that count
    whole.seen = [tuple(torch.cat(part) for part in zip(*layer, strict=True)) for layer in zip(*counted, strict=True)]
    found = {}
    for term, over in TERMS:
        per_sample = sum(weight * losses[term] for weight, losses in zip(weights, alone, strict=True))
        loss = per_sample if over == "sample" else sum(weights) * whole.losses()[term]
        reference.clear()
        (0.7 * loss).backward(retain_graph=True)
        found[term, over] = {"loss": loss.item(), "gradients": reference.gradients()}
    return found


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of the loss and of every parameter's gradient, relative L2; what should be 0 must be 0."""
    assert found["gradients"].keys() == wanted["gradients"].keys()
    errors = [abs(found["loss"] - wanted["loss"]) / abs(wanted["loss"])]
    for name, want in wanted["gradients"].items():
        errors.append(float((found["gradients"][name] - want).norm() / want.norm().clamp(min=1e-30)))
    return float(torch.tensor(errors, dtype=torch.float64).max())  # a NaN stays one


def compare(found: dict[tuple[Any, ...], dict[str, Any]], wanted: dict[tuple[str, str], dict[str, Any]]) -> None:
    for budget in {key[0] for key in found}:
        for term, over in TERMS:
            error = worst(found[budget, term, over], wanted[term, over])
            print(f"{found[budget, term, over]['steps']:g} micro-steps, {term} over {over}: {error:.1e}")
            assert error < TOLERANCE
            assert worst(found[budget, term, over], wanted[term, "sample" if over == "batch" else "batch"]) > 1e-3
        assert worst(found[budget, "fault"], wanted["moe_aux", "batch"]) > 1e-3


def test_terms_do_not_depend_on_micro_steps() -> None:
    found = launch(every_term, "dp1", tuple(BUDGETS.values()), "token", MODEL, ranks=1, timeout_s=60)[0]
    for steps, budget in BUDGETS.items():
        assert found[budget, "moe_aux", "batch"]["steps"] == steps
    compare(found, oracle("token"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_do_not_depend_on_the_layout(layout: str) -> None:
    wanted, ranks = oracle("sum", lengths=RAGGED), parse_layout(layout).ranks
    for found in launch(every_term, layout, (24,), "sum", MODEL, "fsdp", RAGGED, ranks=ranks, timeout_s=60):
        compare(found, wanted)


def test_routers_of_gpt_oss() -> None:
    found = launch(every_term, "cp2-gather", (24,), "sample", "tiny:gpt_oss", ranks=2, timeout_s=60)[0]
    compare(found, oracle("sample", "tiny:gpt_oss"))


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: see docs/megatron.md")
def test_routers_of_pipeline_stages() -> None:
    for found in launch(every_term, "pp2", (24,), "sum", MODEL, "megatron", ranks=2, timeout_s=100):
        compare(found, oracle("sum"))


# One call, recorded routes ------------------------------------------------------------------------------------


def attempts() -> dict[str, str]:
    engine, found = build("cp2-ulysses", 48), {}
    batch = recorded(engine)
    whole = Objective("cross_entropy", moe_aux=0.1, moe_over="batch")
    z_only = Objective("cross_entropy", moe_z=0.1, moe_over="batch")

    def attempt(name: str, samples: Sequence[Sample], objective: Objective, on: Engine = engine) -> None:
        try:
            on.forward_backward(samples, objective)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)

    def altered(routes: Tensor) -> list[Sample]:
        first = batch[0]
        return [Sample(first.input_ids, first.target_ids, first.mask, {"routed_experts": routes}), *batch[1:]]

    good = batch[0].fields["routed_experts"]
    attempt("without", samples(), whole)
    attempt("some", [*batch[:2], samples()[2]], whole)
    attempt("layers", altered(good[:, :1]), whole)
    attempt("floats", altered(good.double()), whole)
    attempt("expert", altered(good + 4), Objective("cross_entropy"))
    assert not engine.backend.has_gradients()
    attempt("first", batch, whole)
    attempt("second", batch, whole)
    attempt("after", batch, Objective("cross_entropy"))
    engine.optim_step(SGD(lr=0.0))
    attempt("plain", batch, Objective("cross_entropy"))
    attempt("behind", samples(), z_only)
    engine.clear_gradients()
    attempt("z", samples(), z_only)
    engine.clear_gradients()
    lora = {name: LoraConfig(r=2, target_modules=["q_proj"]) for name in "ab"}
    named = [Sample(s.input_ids, s.target_ids, s.mask, s.fields, adapter="ab"[n % 2]) for n, s in enumerate(batch)]
    attempt("adapters", named, whole, build("cp2-ulysses", 48, lora=lora))
    attempt("dense", batch, Objective("cross_entropy"), build("cp2-ulysses", 48, model="tiny:qwen3"))
    return found


def test_a_second_call_and_missing_routes_are_refused() -> None:
    expected = {
        "without": "sample 0 has no field 'routed_experts'", "some": "sample 2", "layers": "[12, 2, 2]",
        "floats": "torch.float64", "expert": "experts 0 to 3", "first": "accepted", "second": "one call",
        "after": "one call", "plain": "accepted", "behind": "one call", "z": "accepted", "adapters": "['a', 'b']",
        "dense": "has no experts",
    }  # fmt: skip
    for found in launch(attempts, ranks=2, timeout_s=60):
        for name, part in expected.items():
            assert part in found[name], (name, found[name])


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="'micro-step'"):
        Objective("ppo", moe_aux=0.1, moe_over="micro-step")
    with pytest.raises(ValueError, match="no effect"):
        Objective("ppo", moe_over="batch")
