"""Packed rows through an adapter equal plain transformers, one unpacked sample at a time: hidden states and every
gradient, fp64.

One process, no ranks (`CPGroup.alone`). The oracle is HF's own forward with a plain softmax attention in the
inputs' dtype. Planted faults must be caught. HF's norms and RoPE compute in fp32; the errors measured here are
below 1e-13 all the same.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.data.media import Image, Video
from longspan.data.pack import FieldSpec, pack
from longspan.data.plan import Row
from longspan.data.sample import Sample
from longspan.layout import CPGroup, shard
from longspan.mixers.attention import AttentionCache
from longspan.mixers.kernels import Kernel
from longspan.mixers.kernels.choose import choose_kernel
from longspan.mixers.local import Local
from longspan.models import Adapter, Context, load_model, media_shard, offset_media_rows, plan_media
from longspan.models.loading import build_random
from longspan.models.moe import MoEState
from longspan.models.tiny import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID, tiny
from longspan.parity.oracle_attention import use_plain_layers

TOLERANCE = 1e-10
CPU = torch.device("cpu")
TEXT = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3"]
TEXT += ["glm4", "ministral", "olmo2", "olmo3", "phi3", "smollm3"]
VISION = ["qwen3_vl", "qwen3_vl_moe"]


def text_sample(length: int, seed: int = 0) -> Sample:
    ids = np.random.default_rng(seed).integers(0, 90, length)
    return Sample(ids, ids, np.ones(length))


def vl_sample(*parts: int | tuple[str, int, int], seed: int = 0) -> Sample:
    """Text runs (a length) and media (kind, height, width in pixels) in order; a video has 3 frames."""
    draw = np.random.default_rng(seed)
    ids, media = [], []
    for part in parts:
        if isinstance(part, int):
            ids += draw.integers(0, 90, part).tolist()
            continue
        kind, height, width = part
        shape = (height, width, 3) if kind == "image" else (3, height, width, 3)
        pixels = draw.integers(0, 256, shape, dtype=np.uint8)
        media.append(Image(pixels) if kind == "image" else Video(pixels))
        mark, runs = (IMAGE_ID, 1) if kind == "image" else (VIDEO_ID, 2)
        ids += [VISION_START_ID, *[mark] * (height * width // 64), VISION_END_ID] * runs
    return Sample(ids, ids, np.zeros(len(ids)), media=media)


VL_SAMPLES = [
    vl_sample(3, ("image", 16, 24), 5, seed=1),
    vl_sample(11, seed=2),
    vl_sample(2, ("image", 8, 8), ("image", 16, 16), 4, seed=3),
    vl_sample(1, ("video", 8, 16), 2, ("image", 24, 16), seed=4),
    vl_sample(2, ("video", 8, 8), 1, ("video", 16, 8), ("image", 8, 8), 3, seed=6),
]
TEXT_SAMPLES = [text_sample(length, seed) for seed, length in enumerate((13, 1, 29, 6))]


def packed(
    adapter: Adapter,
    samples: Sequence[Sample],
    *,
    fault: str = "",
    any_media: bool | None = None,
    kernel: Kernel | None = None,
    selective: bool = False,
    moe: MoEState | None = None,
) -> list[Tensor]:
    """Hidden states [L, E] of each sample from one packed row on one rank."""
    tensors = [adapter.sample_tensors(s) | {"input_ids": s.input_ids} for s in samples]
    declared = adapter.declared() | {"input_ids": FieldSpec(torch.int64)}
    tokens = [sum(adapter.media_tokens(s)) for s in samples]
    if adapter.reader is not None and fault != "media_row not offset":
        tensors = offset_media_rows(tensors, tokens)
    stream = pack(Row(tuple(range(len(samples))), 0, 1), tensors, declared, "contiguous")
    if fault == "boundary dropped":
        stream = dataclasses.replace(stream, cu_seqlens=stream.cu_seqlens[[0, -1]])
    if fault == "positions not reset":
        stream.fields["position"].copy_(torch.arange(stream.tokens))
    if fault == "media_row off by one":
        rows = stream.fields["media_row"]
        rows.copy_(torch.where(rows >= 0, (rows + 1) % sum(tokens), rows))
    piece = shard(stream, CPGroup.alone(), CPU)
    media = None
    if any(tokens) if any_media is None else any_media:
        plan = plan_media(samples, adapter.reader, 1)
        media = media_shard(plan, samples=samples, reader=adapter.reader, stream=stream, info=piece.info, device=CPU)
    mixer = Local()
    context = Context(
        info=piece.info,
        mixer=mixer,
        prepared=mixer.prepare(piece.info, CPU),
        kernel=kernel or choose_kernel(CPU, torch.float64, adapter.head_dim),
        cache=AttentionCache() if selective else None,
        tower_cache=AttentionCache() if selective else None,
        moe=moe,
    )
    hidden = adapter.hidden(piece, media, context)
    bounds = [0, *accumulate(len(s) for s in samples)]
    return [hidden.T[:, a:b] for a, b in pairwise(bounds)]


def plain_model(family: str) -> torch.nn.Module:
    """HF's model with the oracle's plain attention and norms, and HF's own loop over experts."""
    oracle = build_random(tiny(family), torch.float64, seed=3)
    use_plain_layers(oracle)
    if any(type(module).__name__.endswith("Experts") for module in oracle.modules()):
        oracle.set_experts_implementation("eager")  # HF's default, grouped_mm, takes no fp64
    return oracle


def plain(model: torch.nn.Module, adapter: Adapter, sample: Sample) -> Tensor:
    """[E, L] from HF's own forward of one unpacked sample; `adapter` only says how pixels are cut."""
    ids = sample.input_ids[None]
    if not sample.media:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state[0].T
    made = {}
    for name, kind in (("", Image), ("_videos", Video)):
        items = [m for m in sample.media if isinstance(m, kind)]
        if items:
            made[f"pixel_values{name}"] = torch.cat([adapter.reader.pixels(m) for m in items])
            grid_name = "image_grid_thw" if kind is Image else "video_grid_thw"
            made[grid_name] = torch.tensor([adapter.reader.grid(m) for m in items])
    kinds = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
    return model.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **made).last_hidden_state[0].T


def loss_of(hidden: Sequence[Tensor]) -> Tensor:
    """A fixed nonlinear functional of every hidden state."""
    total = torch.zeros((), dtype=torch.float64)
    for number, h in enumerate(hidden):
        weight = torch.randn(h.shape, generator=torch.Generator().manual_seed(number), dtype=h.dtype)
        total = total + (weight * h + 0.3 * h**3).sum()
    return total


def errors(family: str, samples: Sequence[Sample], *, share: bool = False, **how: object) -> tuple[float, float]:
    """Worst hidden-state error and worst relative gradient error over all parameters."""
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=3)
    if share:
        adapter.reader = dataclasses.replace(adapter.reader, share=True)
    expected, gradients = truth(family, tuple(samples))
    got = packed(adapter, samples, **how)
    loss_of(got).backward()
    hidden = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    worst = 0.0
    for name, p in adapter.model.named_parameters():
        if gradients[name] is None:
            assert p.grad is None or not p.grad.any(), name
            continue
        worst = max(worst, ((p.grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-12)).item())
    return hidden, worst


@cache
def truth(family: str, samples: tuple[Sample, ...]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Hidden states and gradients of the oracle."""
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=3)
    oracle = plain_model(family)
    expected = [plain(oracle, adapter, sample) for sample in samples]
    loss_of(expected).backward()
    return [h.detach() for h in expected], {name: p.grad for name, p in oracle.named_parameters()}


@pytest.mark.parametrize("family", TEXT)
def test_text_rows_are_exact(family):
    hidden, gradient = errors(family, TEXT_SAMPLES)
    print(f"{family}: hidden {hidden:.1e}, gradient {gradient:.1e}")
    assert hidden < TOLERANCE and gradient < TOLERANCE


@pytest.mark.parametrize("family", TEXT + VISION)
def test_the_head_gives_the_models_own_logits(family):
    """No family scales or caps its logits where `head()` does not say so."""
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=3)
    oracle = plain_model(family)
    weight, bias, softcap = adapter.head()
    with torch.no_grad():
        expected = oracle(input_ids=TEXT_SAMPLES[0].input_ids[None], use_cache=False).logits[0]
        (hidden,) = packed(adapter, TEXT_SAMPLES[:1])
    logits = torch.nn.functional.linear(hidden.T, weight, bias)
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", VISION)
def test_vl_rows_are_exact(family):
    """G1: image+text, text, text+two images, a video with an image, in one row."""
    hidden, gradient = errors(family, VL_SAMPLES)
    print(f"{family}: hidden {hidden:.1e}, gradient {gradient:.1e}")
    assert hidden < TOLERANCE and gradient < TOLERANCE


@pytest.mark.parametrize("number", range(5))
def test_vl_samples_alone_are_exact(number):
    """D3: three-axis positions of a single sample are never taken for packed text positions."""
    hidden, gradient = errors("qwen3_vl", [VL_SAMPLES[number]])
    assert hidden < TOLERANCE and gradient < TOLERANCE


@pytest.mark.parametrize("fault", ["positions not reset", "media_row off by one", "media_row not offset"])
def test_planted_faults_are_caught(fault):
    hidden, gradient = errors("qwen3_vl", VL_SAMPLES, fault=fault)
    assert hidden > 1e-3 and gradient > 1e-3


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "gemma3", "qwen3_moe"])
def test_planted_fault_in_text_is_caught(family):
    hidden, gradient = errors(family, TEXT_SAMPLES, fault="boundary dropped")
    assert hidden > 1e-3 and gradient > 1e-3


def test_a_sampled_placeholder_takes_its_text_embedding():
    """G7: an image id and a run of 4 that the policy sampled equal the plain embedding path and stay in the loss."""
    adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    oracle = plain_model("qwen3_vl")
    sampled = [5, IMAGE_ID, 7, *[IMAGE_ID] * 4, 8]
    answer = Sample([1, 2, *sampled], [2, *sampled, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    got = packed(adapter, [VL_SAMPLES[0], answer])
    expected = [plain(oracle, adapter, VL_SAMPLES[0]), _embedding_path(oracle, answer.input_ids)]
    loss_of(got).backward()
    loss_of(expected).backward()
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < TOLERANCE
    made, wanted = (m.get_input_embeddings().weight.grad[IMAGE_ID] for m in (adapter.model, oracle))
    assert wanted.norm() > 0.1 and (made - wanted).norm() < TOLERANCE * wanted.norm()


def _embedding_path(oracle: torch.nn.Module, ids: Tensor) -> Tensor:
    embeds = oracle.get_input_embeddings()(ids)[None]
    return oracle.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[0].T


def test_dummy_image_changes_nothing():
    """G12: a row without media runs one inert merge unit when another row has some; the tower's gradient is zero."""
    adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    expected = packed(adapter, TEXT_SAMPLES, any_media=False)
    got = packed(adapter, TEXT_SAMPLES, any_media=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    loss_of(got).backward()
    for name, p in adapter.model.model.visual.named_parameters():
        assert p.grad is not None, name  # the backward ran, as its collectives need
        assert not p.grad.any(), name


def test_shared_images_get_the_sum_of_their_gradients():
    """The same picture in two samples is encoded once; its gradient is that of encoding it twice."""
    twice = [vl_sample(3, ("image", 16, 16), 2, seed=5), vl_sample(1, ("image", 16, 16), 4, seed=5)]
    twice[1] = Sample(
        twice[1].input_ids, twice[1].target_ids, twice[1].mask, media=[Image(twice[0].media[0].source.copy())]
    )
    hidden, gradient = errors("qwen3_vl", twice)
    assert hidden < TOLERANCE and gradient < TOLERANCE
    hidden, gradient = errors("qwen3_vl", twice, share=True)
    print(f"shared image: gradient {gradient:.1e}")
    assert hidden < TOLERANCE and gradient < 1e-7  # the tower's RoPE rounds to fp32 (unit roundoff 6e-8) in backward


@pytest.mark.parametrize("trained", ["nothing", "merger"])
def test_frozen_towers(trained):
    """A frozen tower keeps no graph; a trained merger behind it still gets its gradient."""
    adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    whole, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    kept = adapter.parts()["merger"] if trained == "merger" else ()
    for name, p in adapter.model.model.visual.named_parameters():
        p.requires_grad_(any(f"model.visual.{name}".startswith(prefix) for prefix in kept))
    loss_of(packed(adapter, VL_SAMPLES)).backward()
    loss_of(packed(whole, VL_SAMPLES)).backward()
    for (name, p), q in zip(adapter.model.named_parameters(), whole.model.parameters(), strict=True):
        assert (p.grad is None) == (not p.requires_grad), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_selective_recomputation_attends_once():
    """Recomputed layers, tower included, take attention from the cache: same gradient, no second kernel call."""
    runs = []
    for selective in (False, True):
        adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
        if selective:
            adapter.model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        adapter.model.train()
        kernel = Counting(choose_kernel(CPU, torch.float64, adapter.head_dim))
        loss_of(packed(adapter, VL_SAMPLES, kernel=kernel, selective=selective)).backward()
        runs.append((kernel.forwards, {name: p.grad for name, p in adapter.model.named_parameters()}))
    assert runs[0][0] == runs[1][0] == 4  # 2 decoder layers, 2 vision blocks: one varlen call each, not one an image
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1].values(), runs[1][1].values(), strict=True))


class Counting:
    """A kernel that counts its forward calls."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.inner, self.forwards = kernel.name, kernel, 0

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        return self.inner.forward(*args, **kwargs)

    def backward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.backward(*args, **kwargs)
