"""Hybrid families: packed rows through the adapter against transformers on one unpacked sample at a time. One
process.

fp64: HF's forward with a plain softmax attention and, in place of each GatedDeltaNet, the plain recurrence
(`oracle_deltanet`). fp32: unmodified HF, eager. Norms (the DeltaNet's gated one too) and RoPE are HF's own and
compute in fp32 on both sides. Decays are drawn slow: HF's initial ones forget a token within three, which would
hide a leaking or a lost state.
"""

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longspan.data.media import Image, Video
from longspan.data.pack import FieldSpec, pack
from longspan.data.plan import Row
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.layout import CPGroup, shard
from longspan.layout.seqinfo import make_seqinfo
from longspan.mixers import Local
from longspan.mixers.deltanet_naive import use_plain_recurrence
from longspan.mixers.kernels.choose import choose_kernel
from longspan.models import Adapter, Context, load_model, media_shard, offset_media_rows, plan_media
from longspan.models.loading import build_random
from longspan.models.tiny import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID, tiny
from longspan.parity.oracle_attention import NAME as PLAIN_ATTENTION
from longspan.parity.oracle_attention import plain_attention

CPU = torch.device("cpu")
FAMILIES = ("qwen3_5", "qwen3_5_vl", "qwen3_5_moe", "qwen3_next")
LENGTHS = (1, 2, 3, 1, 40, 17)


def text_samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    draw = np.random.default_rng(0)
    return [Sample(ids, ids, np.ones(len(ids))) for ids in (draw.integers(0, 90, length) for length in lengths)]


def vl_sample(*parts: int | tuple[str, int, int], seed: int) -> Sample:
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


def vl_samples() -> list[Sample]:
    return [
        vl_sample(3, ("image", 16, 24), 5, seed=1),
        vl_sample(11, seed=2),
        vl_sample(2, ("image", 8, 8), ("image", 16, 16), 4, seed=3),
        vl_sample(1, ("video", 8, 16), 2, ("image", 24, 16), seed=4),
    ]


def slow(model: nn.Module) -> None:
    """A decay of 0.5 to 0.98 a token, drawn the same for every copy of a model."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty(parameter.shape).uniform_(-4.0, -0.7, generator=draw))


def load(family: str, dtype: torch.dtype) -> Adapter:
    adapter, _ = load_model(f"tiny:{family}", dtype, seed=3)
    slow(adapter.model)
    return adapter


def oracle(family: str, dtype: torch.dtype, *, plain: bool) -> nn.Module:
    model = build_random(tiny(family), dtype, seed=3)
    slow(model)
    model.set_experts_implementation("eager")  # grouped_mm, the default, has no fp64
    if not plain:
        model.set_attn_implementation("eager")
        return model
    AttentionInterface.register(PLAIN_ATTENTION, plain_attention)
    model.set_attn_implementation(PLAIN_ATTENTION)
    use_plain_recurrence(model)
    return model


def packed(adapter: Adapter, samples: Sequence[Sample], *, fault: str = "", inputs: bool = False) -> list[Tensor]:
    """Hidden states [E, L] of each sample from one packed row on one rank."""
    tensors = [adapter.sample_tensors(s) | {"input_ids": s.input_ids} for s in samples]
    declared = adapter.declared() | {"input_ids": FieldSpec(torch.int64)}
    tokens = [sum(adapter.media_tokens(s)) for s in samples]
    if adapter.reader is not None:
        tensors = offset_media_rows(tensors, tokens)
    stream = pack(Row(tuple(range(len(samples))), 0, 1), tensors, declared, "contiguous")
    piece = shard(stream, CPGroup.alone(), CPU)
    media = None
    if any(tokens):
        plan = plan_media(samples, adapter.reader, 1)
        media = media_shard(plan, samples=samples, reader=adapter.reader, stream=stream, info=piece.info, device=CPU)
    mixer = Local()
    prepared = mixer.prepare(piece.info, CPU)
    info = piece.info
    if fault == "boundary dropped":  # of the recurrent layers only: attention is prepared above
        info = make_seqinfo("contiguous", piece.info.cu_seqlens[[0, -1]], piece.info.group)
    context = Context(info, mixer, prepared, choose_kernel(CPU, adapter.model.dtype, adapter.head_dim))
    hidden = adapter.hidden(piece, media, context)
    bounds = [0, *accumulate(len(s) for s in samples)]
    return [hidden.T[:, a:b] for a, b in pairwise(bounds)]


def alone(model: nn.Module, adapter: Adapter, sample: Sample) -> Tensor:
    """[E, L] from HF's own forward of one unpacked sample; `adapter` only says how pixels are cut."""
    ids = sample.input_ids[None]
    if not sample.media:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state[0].T
    made = {}
    for name, kind, grid in (("", Image, "image_grid_thw"), ("_videos", Video, "video_grid_thw")):
        items = [m for m in sample.media if isinstance(m, kind)]
        if items:
            made[f"pixel_values{name}"] = torch.cat([adapter.reader.pixels(m) for m in items])
            made[grid] = torch.tensor([adapter.reader.grid(m) for m in items])
    kinds = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
    return model.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **made).last_hidden_state[0].T


def loss_of(hidden: Sequence[Tensor]) -> Tensor:
    """A fixed nonlinear functional of every hidden state."""
    total = torch.zeros((), dtype=torch.float64)
    for number, h in enumerate(hidden):
        weight = torch.randn(h.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        total = total + (weight * h + 0.3 * h**3).sum()
    return total


def errors(family: str, *, dtype: torch.dtype = torch.float64, fault: str = "") -> tuple[float, float]:
    """Worst hidden-state error and worst relative gradient error over all parameters."""
    samples = vl_samples() if family.endswith("vl") else text_samples()
    adapter = load(family, dtype)
    model = oracle(family, dtype, plain=dtype == torch.float64)
    expected = [alone(model, adapter, sample) for sample in samples]
    loss_of(expected).backward()
    got = packed(adapter, samples, fault=fault)
    loss_of(got).backward()
    hidden = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    wanted = dict(model.named_parameters())
    found = dict(adapter.model.named_parameters())
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, parameter in found.items():
        if wanted[name].grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        difference = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm().clamp(min=1e-12)
        worst = max(worst, difference.item())
    return hidden, worst


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_plain_recurrences(family: str) -> None:
    hidden, gradient = errors(family)
    print(f"{family}: hidden {hidden:.1e}, gradient {gradient:.1e}")
    assert hidden < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_unmodified_transformers_in_fp32(family: str) -> None:
    hidden, gradient = errors(family, dtype=torch.float32)
    print(f"{family}: hidden {hidden:.1e}, gradient {gradient:.1e}")
    assert hidden < 1e-5 and gradient < 1e-5


def test_a_dropped_boundary_is_caught() -> None:
    """D8: the recurrent layers alone run over the boundaries."""
    hidden, gradient = errors("qwen3_5", fault="boundary dropped")
    assert hidden > 1e-3 and gradient > 1e-3


def keep(rows: list[Tensor], module: nn.Module, inputs: object, output: Tensor) -> None:
    output.retain_grad()
    rows.append(output)


def test_another_document_changes_no_bit() -> None:
    """Leak probe: same shapes, one token of one document changed; hidden states and embedding gradients of others."""
    samples = text_samples()
    results = []
    for token in (5, 6):
        changed = samples[4].input_ids.clone()
        changed[20] = token
        row = [*samples[:4], dataclasses.replace(samples[4], input_ids=changed), samples[5]]
        adapter = load("qwen3_5", torch.float64)
        rows: list[Tensor] = []
        adapter.model.get_input_embeddings().register_forward_hook(functools.partial(keep, rows))
        hidden = packed(adapter, row)
        loss_of(hidden).backward()
        results.append((torch.cat(hidden, 1).T, rows[0].grad))
    (hidden_a, grad_a), (hidden_b, grad_b) = results
    start, stop = sum(LENGTHS[:4]), sum(LENGTHS[:5])
    others = torch.tensor([t for t in range(sum(LENGTHS)) if not start <= t < stop])
    assert torch.equal(hidden_a[others], hidden_b[others]) and torch.equal(grad_a[others], grad_b[others])
    assert not torch.equal(hidden_a[start + 20 : stop], hidden_b[start + 20 : stop])


def test_every_recurrent_layer_is_replaced() -> None:
    """D12: no layer of transformers that mixes tokens on its own is left."""
    for family in FAMILIES:
        kinds = {type(module).__name__ for module in load(family, torch.float32).model.modules()}
        assert "GatedDeltaNet" in kinds and not {kind for kind in kinds if kind.endswith("GatedDeltaNet")} - {
            "GatedDeltaNet"
        }


def test_a_missing_boundary_is_an_error() -> None:
    adapter = load("qwen3_5", torch.float32)
    with pytest.raises(UserError, match="longspan=Context"):
        adapter.model(input_ids=torch.tensor([[1, 2, 3]]))
