"""Qwen3-VL over CP ranks equals plain transformers on unpacked samples, fp64: tower shared over ranks, images on
every shard edge.

Four gloo processes, one launch; each holds the whole model, groups are runs of ranks as dynamic CP makes them. The
oracle (plain attention, one sample per forward) runs in the parent. Bugs G1, G10, G12, G14 of the field's reports.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.data.media import Image, Video
from longspan.data.pack import FieldSpec, pack
from longspan.data.plan import Row
from longspan.data.sample import Sample
from longspan.launch import launch
from longspan.layout import CPGroup, Layout, Mesh, shard, split_outputs, unshard
from longspan.mixers import Gather, Ring, Ulysses
from longspan.mixers.kernels.choose import choose_kernel
from longspan.models import Adapter, Context, load_model, media_shard, offset_media_rows, plan_media
from longspan.models.loading import build_random
from longspan.models.tiny import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID, tiny
from longspan.parity.oracle_attention import use_plain_layers

RANKS = 4
TOLERANCE = 1e-10
CPU = torch.device("cpu")
MIXERS = {"gather": Gather, "ring": Ring, "ulysses": Ulysses}


def make_sample(*parts: int | tuple[str, int, int], seed: int) -> Sample:
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


SAMPLES = [
    make_sample(3, ("image", 16, 24), 5, seed=1),
    make_sample(11, seed=2),
    make_sample(2, ("image", 8, 8), ("image", 16, 16), 4, seed=3),
    make_sample(1, ("video", 8, 16), 2, ("image", 24, 16), seed=4),
    make_sample(6, seed=5),
    make_sample(1, seed=6),
    make_sample(3, seed=7),
]
# name -> (mixer, index, rows); a row is (first rank, CP size, samples). Rows tile the four ranks.
CASES = {
    "one image on cp4": ("gather", "contiguous", [(0, 4, [0])]),
    "all on cp4": ("ulysses", "contiguous", [(0, 4, [0, 1, 2, 5, 3, 6, 4])]),
    "all on cp4 zigzag": ("ring", "zigzag", [(0, 4, [4, 3, 5, 2, 6, 1, 0])]),
    "cp2 with a row of text": ("ulysses", "contiguous", [(0, 2, [3, 0, 2]), (2, 2, [1, 4])]),
    "cp3 and an inert rank": ("ring", "zigzag", [(0, 3, [2, 5, 1, 3, 6, 0]), (3, 1, [])]),
    "cp3 and cp1": ("gather", "contiguous", [(0, 1, [0]), (1, 3, [3, 2])]),
    "no media at all": ("ring", "zigzag", [(0, 2, [1]), (2, 2, [4])]),
}


def hidden_of_row(
    adapter: Adapter,
    samples: Sequence[Sample],
    group: CPGroup,
    index: str,
    mixer: str,
    *,
    any_media: bool,
    fault: str = "",
) -> tuple[Tensor, list[Tensor]]:
    """This rank's hidden states [T_local, E] of a packed row, and those of each sample [E, L], gathered."""
    tensors = [adapter.sample_tensors(s) | {"input_ids": s.input_ids, "real": torch.ones(len(s))} for s in samples]
    tensors = offset_media_rows(tensors, [sum(adapter.media_tokens(s)) for s in samples])
    declared = adapter.declared() | {"input_ids": FieldSpec(torch.int64), "real": FieldSpec(torch.float32)}
    stream = pack(Row(tuple(range(len(samples))), group.ranks[0], group.size), tensors, declared, index)
    piece = shard(stream, group, CPU)
    media = None
    if any_media:
        plan = plan_media(samples, adapter.reader, group.size)
        media = media_shard(plan, samples=samples, reader=adapter.reader, stream=stream, info=piece.info, device=CPU)
        if fault == "row off by one":
            media.rows.copy_((media.rows + 1) % (media.padded * group.size))
    how = MIXERS[mixer]()
    kernel = choose_kernel(CPU, torch.float64, adapter.head_dim)
    context = Context(info=piece.info, mixer=how, prepared=how.prepare(piece.info, CPU), kernel=kernel)
    hidden = adapter.hidden(piece, media, context) * piece.fields["real"][:, None]
    return hidden, list(split_outputs(unshard(hidden.T, piece.info), piece))


def token_weights(number: int, length: int) -> Tensor:
    return torch.randn(32, length, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def run_case(mesh: Mesh, name: str, truth: Mapping[int, Tensor], fault: str = "") -> tuple[float, dict[str, Tensor]]:
    """Worst hidden-state error on this rank and the gradient summed over ranks."""
    adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    mixer, index, rows = CASES[name]
    groups = [mesh.group(start, size) for start, size, _ in rows]
    any_media = any(SAMPLES[number].media for _, _, numbers in rows for number in numbers)
    worst = 0.0
    for group, (_, _, numbers) in zip(groups, rows, strict=True):
        if group.rank < 0:
            continue
        samples = [SAMPLES[number] for number in numbers]
        hidden, outputs = hidden_of_row(adapter, samples, group, index, mixer, any_media=any_media, fault=fault)
        for number, made in zip(numbers, outputs, strict=True):
            worst = max(worst, (made - truth[number]).abs().max().item())
        _backward(adapter, samples, numbers, group, index, hidden)
    gradients = {}
    for key, p in adapter.model.named_parameters():
        assert (p.grad is not None) or (not any_media and "visual" in key), f"{key}: no gradient on a rank"
        gradients[key] = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradients[key])
    return worst, gradients


def _backward(adapter, samples, numbers, group, index, hidden) -> None:
    """Backward of sum(weight * hidden + 0.3 hidden^3) over this rank's real tokens."""
    fields = [{"w": token_weights(number, len(s))} for number, s in zip(numbers, samples, strict=True)]
    spec = {"w": FieldSpec(torch.float64, 0, (32,))}
    stream = pack(Row(tuple(range(len(samples))), group.ranks[0], group.size), fields, spec, index)
    weight = shard(stream, group, CPU).fields["w"].T
    (weight * hidden + 0.3 * hidden**3).sum().backward()


CUTS = (
    (2, "contiguous", "ulysses"),
    (3, "contiguous", "gather"),
    (4, "contiguous", "ulysses"),
    (2, "zigzag", "ring"),
    (3, "zigzag", "ring"),
    (4, "zigzag", "ring"),
)


def slide_over_edges(mesh: Mesh) -> list[tuple[str, int, float]]:
    """An image and a video slid over a row, so that every shard edge falls on every token of their runs."""
    adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    alone = CPGroup.alone(mesh.data_rank)
    found = []
    for size, index, mixer in CUTS:
        group = mesh.group(0, size)
        for kind in ("image", "video"):
            for before in range(13):
                sample = make_sample(before, (kind, 16, 16), 12 - before, seed=before)
                if group.rank < 0:
                    continue
                with torch.no_grad():
                    _, (made,) = hidden_of_row(adapter, [sample], group, index, mixer, any_media=True)
                    _, (expected,) = hidden_of_row(adapter, [sample], alone, "contiguous", "gather", any_media=True)
                found.append((f"cp{size} {index} {kind}", before, (made - expected).abs().max().item()))
    return found


def everything(truth: Mapping[int, Tensor]) -> tuple[dict[str, tuple[float, dict[str, Tensor]]], list]:
    mesh = Mesh(Layout(cp=RANKS, mixer="gather"), ranks=RANKS, rank=dist.get_rank(), device=CPU)
    results = {name: run_case(mesh, name, truth) for name in CASES}
    results["fault"] = run_case(mesh, "all on cp4", truth, fault="row off by one")
    return results, slide_over_edges(mesh)


def oracle() -> tuple[dict[int, Tensor], dict[int, dict[str, Tensor]]]:
    """Hidden states [E, L] and the gradient of each sample, from HF's own multimodal forward."""
    adapter, _ = load_model("tiny:qwen3_vl", torch.float64, seed=3)
    hidden, gradients = {}, {}
    for number, sample in enumerate(SAMPLES):
        model = build_random(tiny("qwen3_vl"), torch.float64, seed=3)
        use_plain_layers(model)
        made = {}
        for name, grid_name, kind in (
            ("pixel_values", "image_grid_thw", Image),
            ("pixel_values_videos", "video_grid_thw", Video),
        ):
            items = [m for m in sample.media if isinstance(m, kind)]
            if items:
                made[name] = torch.cat([adapter.reader.pixels(m) for m in items])
                made[grid_name] = torch.tensor([adapter.reader.grid(m) for m in items])
        ids = sample.input_ids[None]
        kinds = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
        out = model.model(input_ids=ids, mm_token_type_ids=kinds if made else None, use_cache=False, **made)
        h = out.last_hidden_state[0].T
        (token_weights(number, len(sample)) * h + 0.3 * h**3).sum().backward()
        hidden[number] = h.detach()
        gradients[number] = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    return hidden, gradients


def test_vision_over_ranks():
    truth, gradients = oracle()
    results = launch(everything, truth, ranks=RANKS, timeout_s=55)
    for name, (_, _, rows) in CASES.items():
        numbers = [number for _, _, row in rows for number in row]
        hidden = max(result[0][name][0] for result in results)
        worst = _worst(results[0][0][name][1], numbers, gradients)
        print(f"{name}: hidden {hidden:.1e}, gradient {worst:.1e}")
        assert hidden < TOLERANCE and worst < TOLERANCE, name
    hidden = max(result[0]["fault"][0] for result in results)
    assert hidden > 1e-3 and _worst(results[0][0]["fault"][1], range(len(SAMPLES)), gradients) > 1e-3
    edges = [entry for result in results for entry in result[1]]
    assert len(edges) == 13 * 2 * sum(size for size, _, _ in CUTS)
    worst_edge = max(edges, key=lambda entry: entry[2])
    print("worst edge", worst_edge)
    assert worst_edge[2] < TOLERANCE, worst_edge


def _worst(made: Mapping[str, Tensor], numbers: Sequence[int], gradients: Mapping[int, Mapping[str, Tensor]]) -> float:
    worst = 0.0
    for key, value in made.items():
        expected = sum(gradients[number][key] for number in numbers)
        if not expected.any():
            assert not value.any(), f"{key}: a gradient where the oracle has exactly none"
            continue
        worst = max(worst, ((value - expected).norm() / expected.norm()).item())
    return worst
