"""Kind J, LoRA: factors on ranks that hold different tokens, equal starts, alpha, and what the sampler serves.

The oracle is peft on a plain Hugging Face model, one unpacked sample at a time, fp64.
"""

import hashlib
import json

import numpy as np
import pytest
import torch
from kit import LIMIT, ZERO, rows
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspan.data import Image, Sample
from longspan.engine import SGD, Engine, EngineConfig
from longspan.engine.fsdp import backend
from longspan.errors import UserError
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.models.tiny import tiny
from longspan.objective import Objective
from longspan.parity import differences
from longspan.parity.cases import Case
from longspan.parity.faults import planted
from longspan.parity.reference import Reference
from longspan.rl import Prompt
from longspan.rl.loop import to_samples
from longspan.rl.rollout import EmbeddedSampler, Sampling, sample_shared

TARGETS = {"a": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)}
SHARED = {"a": LoraConfig(r=4, target_modules=r".*shared_expert\.(up|down)_proj", init_lora_weights=False)}
RAGGED = rows((13, 5, 22, 1), (range(4, 13), range(5), range(7, 20, 2), []))
PLAIN = [Sample(sample.input_ids, sample.target_ids, sample.mask) for sample in RAGGED]  # at temperature 1
STEPS, LR = 2, 0.5
CASE = Case("ppo", "ppo", {"clip": 0.2})
LAYOUTS = ("dp2", "cp2-ring", "cp2-ulysses")


def build(model: str, layout: str, lora: dict | None, dtype: str = "float64") -> Engine:
    return Engine.build(EngineConfig(model, parse_layout(layout), dtype=dtype, lora=lora, max_tokens_per_rank=48))


def digest(weights: dict[str, Tensor]) -> str:
    state = hashlib.blake2b()
    for name in sorted(weights):
        state.update(weights[name].numpy().tobytes())
    return state.hexdigest()


def stepped(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Start, first gradient, end, and a digest of the weights after each step."""
    engine = build("tiny:qwen3", layout, TARGETS)
    start, first, seen = engine.state_dict(), {}, []
    for _ in range(STEPS):
        engine.forward_backward(RAGGED, CASE.objective())
        first = first or engine.gradients()
        engine.optim_step(SGD(lr=LR))
        seen.append(digest(engine.state_dict()))
    return start, first, engine.state_dict(), seen


def all_layouts() -> dict[str, object]:
    found: dict[str, object] = {layout: stepped(layout) for layout in LAYOUTS}
    with planted("cp-factor"):
        found["fault"] = stepped("cp2-ring")
    return found


def adapted(start: dict[str, Tensor]) -> Reference:
    """The oracle with peft's own layers and the given factors; the base is frozen."""
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    inject_adapter_in_model(TARGETS["a"], reference.model, adapter_name="a")
    reference.model.double()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("lora_" in name)
    reference.set_weights(start)
    return reference


def test_j1_factors_get_the_sum_over_ranks_and_copies_stay_equal():
    """Every axis that splits tokens: the first gradient and the weights after two steps are peft's; ranks agree."""
    results = launch(all_layouts, ranks=2, timeout_s=100, device="cpu")
    reference = adapted(results[0]["dp2"][0])
    gradients: dict[str, Tensor] = {}
    for _ in range(STEPS):
        reference.clear()
        found = reference.run(RAGGED, CASE).gradients
        gradients = gradients or found
        moved = {
            name: weight - LR * found[name] if name in found else weight for name, weight in reference.weights().items()
        }
        reference.set_weights(moved)
    assert all("lora_" in name for name in gradients) and len(gradients) == 12
    for layout in LAYOUTS:
        _, first, end, seen = results[0][layout]
        assert differences.parameters(first, gradients, ZERO)[0] <= LIMIT, layout
        assert differences.parameters(end, reference.weights(), ZERO)[0] <= LIMIT, layout
        assert all(result[layout][3] == seen for result in results), "ranks hold other bits"
    assert differences.parameters(results[0]["fault"][1], gradients, ZERO)[0] > 1e-2


def starts(layout: str, folder: str) -> list[str]:
    """Digests after building, after a step, and after loading."""
    engine = build("tiny:qwen3_5_moe", layout, SHARED)
    seen = [digest(engine.state_dict())]
    engine.forward_backward(RAGGED[:2], Objective("cross_entropy"))
    engine.optim_step(SGD(lr=LR))
    engine.save(folder)
    seen.append(digest(engine.state_dict()))
    engine.load(folder)
    return [*seen, digest(engine.state_dict())]


def start_by_rank() -> str:
    """The planted fault: the start of adapters drawn from a seed of each rank's own."""
    right = backend.add_adapters
    backend.add_adapters = lambda adapter, configs, seed: right(
        adapter, configs, seed + world().rank
    )  # in this process
    return digest(build("tiny:qwen3_5_moe", "cp2-gather", SHARED).state_dict())


def test_j3_adapters_of_shared_experts_start_and_stay_equal(tmp_path):
    """After building, a step and a load every rank holds the same bits; the start is one rank's at every layout, which ranks
    that draw for themselves cannot make of their shards."""
    found = {
        layout: launch(starts, layout, str(tmp_path / layout), ranks=ranks, timeout_s=60, device="cpu")
        for layout, ranks in (("ep2", 2), ("cp2-gather", 2), ("dp1", 1))
    }
    for told in found.values():
        assert all(own == told[0] for own in told) and told[0][1] == told[0][2] != told[0][0]
    (alone,) = found.pop("dp1")
    assert all(told[0][0] == alone[0] for told in found.values())
    assert alone[0] not in launch(start_by_rank, ranks=2, timeout_s=60, device="cpu")


def exported(folder: str) -> list[Tensor]:
    config = {"a": LoraConfig(r=4, target_modules=["q_proj", "o_proj"])}  # without alpha
    engine = build("tiny:qwen3", "dp2", config, dtype="float32")
    for _ in range(2):  # the first step moves only B, which starts at 0
        engine.forward_backward(PLAIN, Objective("cross_entropy"))
        engine.optim_step(SGD(lr=LR))
    engine.export(folder)
    return [out["logprob"] for out in engine.forward(PLAIN)]


def test_j4_alpha_has_pefts_default_and_comes_back(tmp_path):
    """Create without alpha, train, export, load with peft: the live model's log-probs, which are not the base's."""
    logprob = launch(exported, str(tmp_path / "adapter"), ranks=2, timeout_s=60, device="cpu")[0]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(tiny("qwen3"))
    plain = scores(base)
    with_adapter = scores(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert differences.tokens(with_adapter, logprob, PLAIN)[0] < 1e-5
    assert differences.tokens(plain, logprob, PLAIN)[0] > 1e-2


@torch.no_grad()
def scores(model: torch.nn.Module) -> list[Tensor]:
    found = []
    for sample in PLAIN:
        logprob = model(input_ids=sample.input_ids[None]).logits[0].log_softmax(-1)
        found.append(logprob.gather(-1, sample.target_ids[:, None])[:, 0])
    return found


@pytest.mark.parametrize("alpha", [0, -1])
def test_j4_an_alpha_that_switches_the_adapter_off_is_refused(alpha):
    def refused() -> str:
        with pytest.raises(UserError) as caught:
            build("tiny:qwen3", "dp1", {"a": LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"])})
        return str(caught.value)

    message = launch(refused, ranks=1, timeout_s=60, device="cpu")[0]
    assert f"lora_alpha={alpha}" in message and "default of 8" in message


def served(lora: dict | None) -> tuple[float, float]:
    """Largest gap between sampler and trainer on sampled tokens after two steps, and that of stale weights."""
    engine = build("tiny:qwen3_vl", "cp2-ulysses", lora)
    picture = Image(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    prompts = [Prompt("text", (5, 9, 11)), Prompt("seen", (4, 95, 93, 93, 93, 93, 96, 7), (picture,))]
    sampler = EmbeddedSampler(engine, eos=[3])
    sampling = Sampling(4, 1.0, 6, prompts_per_batch=1, seed=0, stream=0)
    gaps = []
    sampler.load(engine.state_dict())
    for fresh in (False, True):
        if fresh:
            sampler.load(engine.state_dict())
        groups = sample_shared(sampler, prompts, range(2), sampling, engine.mesh.all)
        samples = to_samples(prompts, groups, [1.0] * 8, 1.0)
        if not fresh:
            for _ in range(2):
                engine.forward_backward(samples, Objective("cross_entropy"))
                engine.optim_step(SGD(lr=LR))
        own = [out["logprob"] for out in engine.forward(samples)]
        gaps.append(differences.tokens(own, [sample.fields["old_logprob"] for sample in samples], samples)[0])
    return gaps[1], gaps[0]


@pytest.mark.parametrize("rank", [0, 8])
def test_j6_the_sampler_serves_what_is_trained(rank):
    """Rank 0 (the whole model) and rank 8, on text and pictures."""
    lora = {"a": LoraConfig(r=rank, target_modules=r".*language_model.*(q|v|up)_proj")} if rank else None
    for gap, stale in launch(served, lora, ranks=2, timeout_s=60, device="cpu"):
        assert gap < 1e-9 and stale > 1e-3


def test_j6_a_sampler_for_several_adapters_is_refused():
    def refused() -> str:
        pair = {name: LoraConfig(r=2, target_modules=["q_proj"]) for name in "ab"}
        with pytest.raises(UserError) as caught:
            EmbeddedSampler(build("tiny:qwen3", "dp1", pair), eos=[3])
        return str(caught.value)

    assert "['a', 'b']" in launch(refused, ranks=1, timeout_s=60, device="cpu")[0]
