"""Gated DeltaNet on one or two GPUs of one host: forward and forward+backward of convolution and rule, through the package.

    python benchmarks/deltanet.py                          # needs fla-core; --smoke runs on 2 CPU processes
    python benchmarks/deltanet.py --only "64k row" state   # one row, and of the ways the sharded ones and the baseline

16 key and 32 value heads of 128, bf16; one 64k document and the 64k mix of 23 documents. On one GPU: the package, runs
left whole and cut into pieces; the package's plain torch rule; and "fla alone": fla's own layer functions on cu_seqlens.
On two GPUs the sharded ways stand beside them. Efficiency: time on one GPU
(same process and run, runs left whole) / (ranks * time). "state" passes states between ranks, with runs left whole and
cut into pieces of 4k to 16k tokens; "heads" shares the heads out by all-to-all. A repeat is the mean of CALLS calls one
after the other, as layers come, on the slower rank. Errors: relative L2 of output and gradients against one GPU.
first_s: the first call of a way, compilation and tuning included. A kernel with more than 12 configurations (convolution
16, unit vectors 25) tunes over those with four warps only, for "fla alone" too. The file is written after every way, the
package's defaults first. fla keeps compiled kernels and tuning in TRITON_CACHE_DIR, TileLang in TILELANG_CACHE_DIR: carry
both over. Cold, compilation alone, for Hopper on one core of a busy CPU (Triton 3.7.1): 90 kernels in 116 s for the first
way (with every configuration 166 in 169 s), the scans with states about 48 more for the first way with pieces; TileLang's
kernel 11 to 15 s. Eight other programs beside it and every configuration: 175 s were too short for the first way.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Settings, cu_seqlens, settings, slowest_ms
from torch import Tensor

from longspan.launch import launch, world
from longspan.layout import make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo
from longspan.mixers.deltanet_choose import choose_delta_kernel
from longspan.mixers.deltanet_pieces import cut_pieces
from longspan.mixers.deltanet_torch import TorchDeltaKernel
from longspan.mixers.linear import DeltaShape, DeltaWeights, LinearPrepared, gated_delta, prepare_linear

RANKS = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
SHAPE = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
SMOKE = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=8)
PIECES = (None, 8192, 4096, 16384)
MOST = 12  # configurations a kernel tunes over as fla lists them


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def ways(
    info: SeqInfo, alone: SeqInfo, where: torch.device, dtype: torch.dtype
) -> dict[str, tuple[SeqInfo, LinearPrepared]]:
    """Name -> the row as this rank sees it, and how it is worked on."""
    make = choose_delta_kernel(where, dtype).make

    def state(seen: SeqInfo, longest: int | None) -> tuple[SeqInfo, LinearPrepared]:
        pieces = cut_pieces(seen, longest)
        return seen, LinearPrepared("state", pieces, seen.group, make(pieces, where), None)

    found = {"one GPU": state(alone, None)}
    if RANKS > 1:
        found |= {f"state, {f'pieces of {n}' if n else 'whole runs'}": state(info, n) for n in PIECES}
        found["heads"] = (info, prepare_linear(info, where, how="heads", dtype=dtype))
    found |= {f"one GPU, pieces of {longest}": state(alone, longest) for longest in PIECES if longest}
    return found | {"one GPU, torch rule": (alone, torch_rule(alone, where))}


def chosen(asked: Settings, names: Iterable[str]) -> list[str]:
    """The names that `--only` asks for; all where it asks for none of them."""
    every = list(names)
    return [name for name in every if asked.wants(name)] or every


def tune_over_fewer() -> None:
    """Holds for kernels defined after this call, so it comes before fla's import."""
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner.__init__

    def short(self: Any, fn: Any, arg_names: Any, configs: list[Any], *others: Any, **named: Any) -> None:
        four = [config for config in configs if config.num_warps == 4]
        plain(self, fn, arg_names, four if len(configs) > MOST and four else configs, *others, **named)

    Autotuner.__init__ = short


def torch_rule(alone: SeqInfo, where: torch.device) -> LinearPrepared:
    pieces = cut_pieces(alone)
    return LinearPrepared("state", pieces, alone.group, TorchDeltaKernel(pieces, where), None)


def fla_alone(local: list[Tensor], weights: DeltaWeights, shape: DeltaShape, cu: Tensor) -> Tensor:
    """The layer in fla's own functions: what a model that uses fla directly runs on a packed row."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    mixed, b, a = (x[None] for x in local)
    mixed, _ = causal_conv1d(mixed, weights.conv, activation="silu", cu_seqlens=cu)
    q, k, v = mixed.split(shape.channels, 2)
    g = -weights.log_decay.float().exp() * torch.nn.functional.softplus(a.float() + weights.step_bias)
    out, _ = chunk_gated_delta_rule(
        q.unflatten(2, (shape.key_heads, shape.key_dim)),
        k.unflatten(2, (shape.key_heads, shape.key_dim)),
        v.unflatten(2, (shape.value_heads, shape.value_dim)),
        g,
        b.sigmoid(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu,
    )
    return out[0]


def bench(asked: Settings) -> None:
    """Every row, on every rank; rank 0 reports."""
    if torch.cuda.is_available() and find_spec("fla") is not None:
        tune_over_fewer()
    report = Report("deltanet", asked, (__doc__ or "").replace("\n", " ")) if dist.get_rank() == 0 else None
    for name in chosen(asked, asked.rows):
        bench_row(asked, name, asked.rows[name], report)


def bench_row(asked: Settings, name: str, lengths: tuple[int, ...], report: Report | None) -> None:
    """The ways asked for, on one row."""
    where, rank = world().device, dist.get_rank()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    shape = SMOKE if asked.smoke else SHAPE
    group = CPGroup(dist.group.WORLD, rank, RANKS, tuple(range(RANKS)))
    cu = cu_seqlens(lengths, torch.device("cpu"))
    info, alone = make_seqinfo("contiguous", cu, group), make_seqinfo("contiguous", cu, CPGroup.alone(rank))
    draw = torch.Generator(device=where).manual_seed(0)  # the same row on every rank
    tokens, channels, heads = sum(lengths), sum(shape.channels), shape.value_heads
    sizes = [(tokens, channels), (tokens, heads), (tokens, heads), (tokens, heads, shape.value_dim)]
    mixed, b, a, gradient = (torch.randn(s, device=where, generator=draw).to(dtype) for s in sizes)
    conv = torch.randn(channels, 4, device=where, generator=draw).to(dtype).requires_grad_()
    decays = [torch.full((heads,), -2.0, device=where, dtype=dtype).requires_grad_() for _ in range(2)]
    one: dict[str, Any] = {}  # the row of the first way, with which the others are compared
    whole: list[Tensor] = []
    listed: dict[str, tuple[SeqInfo, LinearPrepared | None]] = dict(ways(info, alone, where, dtype))
    if where.type == "cuda" and find_spec("fla") is not None:
        listed["one GPU, fla alone"] = (alone, None)
    boundaries = cu.to(where, torch.int64)
    for way in dict.fromkeys(["one GPU", *chosen(asked, listed)]):
        seen, prepared = listed[way]
        index = seen.index.to(where)
        local = [x[index].contiguous().requires_grad_() for x in (mixed, b, a)]
        pull = gradient[index].contiguous()

        def forward(local: list[Tensor] = local, prepared: LinearPrepared | None = prepared) -> Tensor:
            weights = DeltaWeights(conv, *decays)
            if prepared is None:
                return fla_alone(local, weights, shape, boundaries)
            return gated_delta(*local, weights, shape=shape, prepared=prepared, layer=0)

        def both(local: list[Tensor] = local, pull: Tensor = pull, run: Callable[[], Tensor] = forward) -> list[Tensor]:
            out = run()
            return [out.detach(), *torch.autograd.grad(out, [*local, conv, *decays], pull)[:3]]

        start = time.perf_counter()
        found = both()
        whole = whole or found
        mine = max(relative(x, y[index]) for x, y in zip(found, whole, strict=True))
        first_s = round(time.perf_counter() - start, 1)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        with torch.no_grad():
            forward_ms = slowest_ms(forward, asked.repeats)
        row = {
            "row": name,
            "way": way,
            "error": max(every),
            "first_s": first_s,
            "forward_ms": forward_ms,
            "both_ms": slowest_ms(both, asked.repeats),
        }
        one, used = one or row, 1 if way.startswith("one") else RANKS
        for part in ("forward_ms", "both_ms"):
            ratio = statistics.median(one[part]) / statistics.median(row[part]) / used
            row[f"efficiency_{part.removesuffix('_ms')}"] = round(ratio, 3)
        if report is not None:
            report.add(**row)
            report.save(bars=lambda row: (row["row"], row["way"], row["median_both_ms"]), unit="forward + backward, ms")


def main() -> None:
    launch(bench, settings(__doc__ or ""), ranks=RANKS, timeout_s=1800)


if __name__ == "__main__":
    main()
