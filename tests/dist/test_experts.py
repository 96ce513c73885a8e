"""Mixture-of-experts families over four ranks equal plain transformers, fp64: experts on ep 1, 2 and 4, routers'
losses under CP, replayed routes, windows and sinks under every mixer.

One launch. Each rank holds the whole model but its part of the experts; the oracle runs in the parent, one unpacked
sample at a time. Control: experts held in the wrong order.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from longspan.data.pack import FieldSpec, pack
from longspan.data.plan import Row
from longspan.data.sample import Sample
from longspan.launch import launch
from longspan.layout import CPGroup, Layout, Mesh, shard, split_outputs, unshard
from longspan.mixers import Gather, Local, Ring, Ulysses
from longspan.mixers.kernels.choose import choose_kernel
from longspan.models import Context, load_model
from longspan.models.experts import expert_modules, shard_experts
from longspan.models.loading import build_random
from longspan.models.moe import MoEState, router_terms
from longspan.models.tiny import tiny
from longspan.parity.oracle_attention import use_plain_layers

RANKS = 4
TOLERANCE = 1e-10
CPU = torch.device("cpu")
MIXERS = {"gather": Gather, "ring": Ring, "ulysses": Ulysses, "local": Local}
LENGTHS = (13, 1, 29, 6, 17)
# family, mixer, index, expert-parallel size, rows as (first rank, CP size, samples)
CASES = [
    ("qwen3_moe", "ulysses", "contiguous", 1, [(0, 4, [0, 1, 2, 3, 4])]),
    ("qwen3_moe", "ring", "zigzag", 2, [(0, 2, [0, 2]), (2, 2, [4, 1, 3])]),
    ("qwen3_moe", "gather", "contiguous", 4, [(0, 3, [2, 1, 0]), (3, 1, [4, 3])]),
    ("qwen3_moe", "local", "contiguous", 4, [(0, 1, [0, 4]), (1, 1, [1]), (2, 1, [2, 3]), (3, 1, [])]),
    ("gpt_oss", "gather", "contiguous", 4, [(0, 4, [0, 1, 2, 3, 4])]),
    ("gpt_oss", "ulysses", "contiguous", 2, [(0, 2, [0, 2]), (2, 2, [4, 1, 3])]),
    ("gpt_oss", "ring", "contiguous", 2, [(0, 3, [4, 0, 2]), (3, 1, [1, 3])]),
    ("gemma3", "gather", "contiguous", 1, [(0, 3, [2, 1, 0]), (3, 1, [4, 3])]),
    ("gemma3", "ulysses", "contiguous", 1, [(0, 4, [4, 3, 2, 1, 0])]),
    ("mistral", "ring", "contiguous", 1, [(0, 4, [4, 3, 2, 1, 0])]),
]


def samples() -> list[Sample]:
    draws = [np.random.default_rng(number).integers(0, 97, length) for number, length in enumerate(LENGTHS)]
    return [Sample(ids, ids, np.ones(len(ids))) for ids in draws]


def token_weights(number: int, length: int) -> Tensor:
    """[33, L]: 32 for the hidden state, one for the routers' losses (constant over a sample)."""
    weight = torch.randn(33, length, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    weight[32] = 1 + 0.3 * number
    return weight


def total(hidden: Tensor, weight: Tensor, aux: Tensor | None, z: Tensor | None) -> Tensor:
    """hidden [T, E], weight [33, T] -> the scalar whose gradient is compared."""
    value = (weight[:32].T * hidden + 0.3 * hidden**3 * (weight[32:] > 0).T).sum()
    return value if aux is None else value + (weight[32] * (2 * aux + 0.1 * z)).sum()


def run_case(mesh: Mesh, case: tuple, routes: Mapping[int, Tensor] | None, *, fault: bool = False) -> dict[str, Tensor]:
    """Hidden states by sample, router losses and gradients, gathered over ranks and experts."""
    family, mixer, index, ep, rows = case
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=3)
    experts = [mesh.group(start, ep) for start in range(0, RANKS, ep)][mesh.data_rank // ep]
    if fault:
        for module in expert_modules(adapter.model).values():
            module.down_proj.data = module.down_proj.data.flip(0)
    if ep > 1:
        axis = init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=("replica", "ep"))["ep"]
        shard_experts(adapter.model, experts, axis)
    groups = [mesh.group(start, size) for start, size, _ in rows]
    ((group, numbers),) = [(g, row[2]) for g, row in zip(groups, rows, strict=True) if g.rank >= 0]
    batch = samples()
    made = [
        adapter.sample_tensors(batch[n])
        | {"input_ids": batch[n].input_ids, "weight": token_weights(n, LENGTHS[n])}
        | ({} if routes is None else {"routes": routes[n]})
        for n in numbers
    ]
    declared = adapter.declared() | {"input_ids": FieldSpec(torch.int64), "weight": FieldSpec(torch.float64, 0, (33,))}
    if routes is not None:
        declared |= {"routes": FieldSpec(torch.int64, 0, (2, 2))}
    stream = pack(Row(tuple(range(len(numbers))), group.ranks[0], group.size), made, declared, index)
    piece = shard(stream, group, CPU)
    how = MIXERS["local" if group.size == 1 else mixer]()
    state = MoEState(keep_logits=True, keep_routes=True, replay=piece.fields.get("routes"))
    context = Context(
        info=piece.info,
        mixer=how,
        prepared=how.prepare(piece.info, CPU),
        kernel=choose_kernel(CPU, torch.float64, adapter.head_dim),
        moe=state,
    )
    hidden = adapter.hidden(piece, None, context)
    terms = router_terms(state, info=piece.info, lengths=piece.lengths) if state.logits else None
    aux, z = (None, None) if terms is None else (terms.aux, terms.z)
    total(hidden, piece.fields["weight"], aux, z).backward()
    results = {}
    for number, states in zip(numbers, split_outputs(unshard(hidden.T, piece.info), piece), strict=True):
        results[f"hidden {number}"] = states
    if state.routes:
        recorded = split_outputs(unshard(state.recorded(), piece.info), piece)
        results |= {f"routes {number}": r for number, r in zip(numbers, recorded, strict=True)}
    return results | whole_gradients(adapter.model, experts, mesh)


def whole_gradients(model: torch.nn.Module, experts: CPGroup, mesh: Mesh) -> dict[str, Tensor]:
    """Sum over all ranks; experts: sum over ranks with the same experts, then put side by side."""
    held = {
        f"{name}.{key}" for name, m in expert_modules(model).items() for key, _ in m.named_parameters(recurse=False)
    }
    gradients = {}
    for name, p in model.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        if name in held and experts.size > 1:
            assert p.grad is not None, f"{name}: no gradient on rank {mesh.data_rank}"
            gradient = gradient.to_local()
            full = gradient.new_zeros(experts.size, *gradient.shape)
            full[experts.rank] = gradient
            gradient = full.flatten(0, 1)
        dist.all_reduce(gradient)
        gradients[name] = gradient
    return gradients


def everything(routes: Mapping[int, Tensor]) -> list[dict[str, Tensor]]:
    mesh = Mesh(Layout(cp=RANKS, mixer="gather"), ranks=RANKS, rank=dist.get_rank(), device=CPU)
    found = [run_case(mesh, case, None) for case in CASES]
    found.append(run_case(mesh, CASES[1], routes))
    found.append(run_case(mesh, CASES[1], None, fault=True))
    return found


def oracle(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Hidden states and routes by sample, and the gradient over all samples, from plain transformers."""
    model = build_random(tiny(family), torch.float64, seed=3)
    use_plain_layers(model)
    kept: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda m, args, out: kept.append((out[0], out[2])))
    if kept or any(type(m).__name__.endswith("Experts") for m in model.modules()):
        model.set_experts_implementation("eager")
    results, value = {}, torch.zeros((), dtype=torch.float64)
    for number, sample in enumerate(samples()):
        kept.clear()
        hidden = model.model(input_ids=sample.input_ids[None], use_cache=False).last_hidden_state[0]
        weight = token_weights(number, len(sample))
        value = value + total(hidden, weight, None, None)
        for logits, routes in kept:
            share = torch.stack([(routes == e).double().mean() for e in range(logits.shape[1])])
            aux = logits.shape[1] * (share * logits.softmax(-1).mean(0)).sum()
            value = value + weight[32, 0] * (2 * aux + 0.1 * logits.logsumexp(-1).square().mean())
        results[f"hidden {number}"] = hidden.detach().T
        if kept:
            results[f"routes {number}"] = torch.stack([routes.T for _, routes in kept])
    value.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return results, gradients


def test_experts_over_ranks():
    truths = {family: oracle(family) for family in {case[0] for case in CASES}}
    routes = {n: truths["qwen3_moe"][0][f"routes {n}"] for n in range(len(LENGTHS))}
    found = launch(everything, routes, ranks=RANKS, timeout_s=58)
    for number, case in enumerate(CASES):
        hidden, gradient = compare([ranks[number] for ranks in found], truths[case[0]])
        print(f"{case[0]} {case[1]} ep{case[3]}: hidden {hidden:.1e}, gradient {gradient:.1e}")
        assert hidden < TOLERANCE and gradient < TOLERANCE, case
    hidden, gradient = compare([ranks[len(CASES)] for ranks in found], truths["qwen3_moe"])
    assert hidden < TOLERANCE and gradient < 1e-7  # replayed scores: HF's are fp32 either way
    hidden, gradient = compare([ranks[len(CASES) + 1] for ranks in found], truths["qwen3_moe"])
    assert hidden > 1e-3 and gradient > 1e-3


def compare(
    found: Sequence[Mapping[str, Tensor]], truth: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
) -> tuple[float, float]:
    """Worst hidden-state error (1 where a route differs) and worst relative gradient error."""
    results, gradients = truth
    hidden = worst = 0.0
    for rank in found:
        for key in rank:
            if key.startswith("hidden"):
                hidden = max(hidden, (rank[key] - results[key]).abs().max().item())
            elif key.startswith("routes") and not torch.equal(rank[key], results[key]):
                hidden = max(hidden, 1.0)  # another expert: as wrong as it gets
    for name, expected in gradients.items():
        made = found[0][name]
        worst = max(worst, ((made - expected).norm() / expected.norm().clamp(min=1e-12)).item())
    return hidden, worst
