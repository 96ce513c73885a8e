"""Kind K, what is written and read back: ties, missing tensors, experts."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspan.data import Sample
from longspan.engine import AdamW, Engine, EngineConfig
from longspan.errors import CheckpointError, UserError
from longspan.launch import launch
from longspan.layout import parse_layout
from longspan.models.tiny import tiny
from longspan.objective import Objective

PLAIN = [Sample(sample.input_ids, sample.target_ids, sample.mask) for sample in rows((13, 5, 8))]


def build(model: str, layout: str, **settings: object) -> Engine:
    return Engine.build(EngineConfig(model, parse_layout(layout), max_tokens_per_rank=64, **settings))


def train(engine: Engine) -> float:
    loss = engine.forward_backward(PLAIN, Objective("cross_entropy"))["loss/total"]
    engine.optim_step(AdamW(lr=1e-2))
    return loss


def five_steps(folder: str) -> tuple[float, float, bool, list[Tensor]]:
    """The sixth loss, the same after saving and loading into other weights, whether the tie holds, and log-probs."""
    engine = build("tiny:qwen2", "dp2")
    for _ in range(5):
        train(engine)
    engine.save(f"{folder}/checkpoint")
    engine.export(f"{folder}/model")
    logprob = [out["logprob"] for out in engine.forward(PLAIN)]
    other = build("tiny:qwen2", "dp2", seed=9)
    other.load(f"{folder}/checkpoint")
    model = other.adapter.model
    return (
        train(engine),
        train(other),
        model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        logprob,
    )


def names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def plain(family: str, folder: Path) -> AutoModelForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(tiny(family))
    model.save_pretrained(folder)
    return model


def test_k1_a_tied_head_is_one_tensor_through_save_load_and_export(tmp_path):
    """tie_word_embeddings true: the next loss after five steps, a save and a load is the same to the bit."""
    results = launch(five_steps, str(tmp_path), ranks=2, timeout_s=60, device="cpu")
    assert all(mine == loaded and tied for mine, loaded, tied, _ in results)
    logprob = results[0][3]
    assert "lm_head.weight" not in names(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        for sample, own in zip(PLAIN, logprob, strict=True):
            scores = model(input_ids=sample.input_ids[None]).logits[0].log_softmax(-1)
            assert float((scores.gather(-1, sample.target_ids[:, None])[:, 0] - own).abs().max()) < 1e-5


def with_value_head(folder: str) -> None:
    engine = build("tiny:qwen3", "cp2-ring", value_head=True)
    engine.export(folder)


def test_k4_an_export_without_the_optional_head_has_every_other_tensor(tmp_path):
    """The value head is ours and stays out; all names are those that transformers itself writes."""
    launch(with_value_head, str(tmp_path / "own"), ranks=2, timeout_s=60, device="cpu")
    plain("qwen3", tmp_path / "plain")
    assert names(tmp_path / "own") == names(tmp_path / "plain")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def incomplete_export(folder: str) -> str:
    engine = build("tiny:qwen3", "cp2-ring")
    weights = engine.backend.weights

    def lossy() -> Mapping[str, Tensor]:
        return {name: value for name, value in weights().items() if name != "model.layers.1.mlp.up_proj.weight"}

    engine.backend.weights = lossy
    try:
        engine.export(folder)
    except CheckpointError as error:
        return str(error)
    return "written"


def test_k4_an_export_that_lacks_a_tensor_is_an_error_on_all_ranks(tmp_path):
    for message in launch(incomplete_export, str(tmp_path / "own"), ranks=2, timeout_s=60, device="cpu"):
        assert "model.layers.1.mlp.up_proj.weight" in message and "1 of" in message
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_k4_a_folder_that_lacks_a_tensor_is_not_filled_with_random_values(damage, tmp_path):
    plain("qwen3", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    taken = tensors.pop(name)
    if damage == "shape":
        tensors[name] = taken[1:].clone()
    save_file(tensors, file, metadata={"format": "pt"})

    def refused() -> str:
        with pytest.raises(UserError) as caught:
            build(str(tmp_path), "dp1")
        return str(caught.value)

    message = launch(refused, ranks=1, timeout_s=60, device="cpu")[0]
    assert name in message and "(1 tensors in all)" in message


def reexported(folder: str, out: str, layout: str) -> None:
    build(folder, layout).export(out)


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_k6_every_expert_comes_back_as_itself(family, layout, tmp_path):
    """A constant of its own in each expert: engine, export, transformers; bit for bit, at ep=2 too."""
    model = plain(family, tmp_path / "before")
    with torch.no_grad():
        stacked = {name: weight for name, weight in model.named_parameters() if ".experts." in name}
        for weight in stacked.values():
            weight.copy_(torch.arange(1.0, 5.0).reshape(-1, *[1] * (weight.dim() - 1)).expand_as(weight))
    model.save_pretrained(tmp_path / "before")
    launch(reexported, str(tmp_path / "before"), str(tmp_path / "after"), layout, ranks=2, timeout_s=60, device="cpu")
    assert names(tmp_path / "after") == names(tmp_path / "before")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    assert len(stacked) >= 2 * 2
    for name, weight in model.state_dict().items():
        assert torch.equal(after[name], weight), name
    assert all(len(after[name].flatten(1).unique(dim=0)) == 4 for name in stacked)


def draws() -> list[object]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # the global state is the point


def random_state(folder: str) -> tuple[list[object], list[object], list[object]]:
    """What this rank draws after a save, after loading it, and after loading the weights only."""
    engine = build("tiny:qwen3", "dp2")
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(7 + engine.rank)
    engine.save(folder)
    first = draws()
    engine.load(folder)
    second = draws()
    engine.load(folder, optimizer=False)
    return first, second, draws()


def test_k10_the_random_state_of_each_rank_is_in_the_checkpoint(tmp_path):
    """Python's, numpy's and torch's; dropout itself is refused (L11), samplers and user code draw from these."""
    results = launch(random_state, str(tmp_path / "run"), ranks=2, timeout_s=60, device="cpu")
    for first, second, cold in results:
        assert first == second != cold
    assert results[0][0] != results[1][0], "each rank has its own"
