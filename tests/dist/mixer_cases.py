"""What the mixer tests run inside the ranks: one case of one mixer against the naive attention of the whole stream.

Every rank builds the whole stream from a seed, so nothing is sent to compare. Errors are relative L2 over this rank's
rows of out, dq, dk, dv (and of the summed dsink).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from late import Late
from torch import Tensor

from longspan.layout import Layout, Mesh, SeqInfo, make_seqinfo
from longspan.mixers import Mixer, make_mixer, naive
from longspan.mixers.kernels import Kernel
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.transport import Transport

SCALE = 0.3
REFERENCE = Reference()
OVERLAPPED = "overlapped gather"  # what make_mixer gives for "gather" over a transport that leaves the SMs alone

# (mixer, index) -> the CP sizes it is tested at, on 4 ranks (one rank alone: tests/unit/test_mixers_local.py)
FORMS = {
    ("ulysses", "contiguous"): (2, 3, 4),
    ("ulysses", "zigzag"): (2, 3, 4),
    ("ring", "contiguous"): (2, 3, 4),
    ("ring", "zigzag"): (2, 3, 4),
    ("gather", "contiguous"): (2, 3, 4),
    ("gather", "zigzag"): (2, 3, 4),
    ("hybrid", "contiguous"): (2, 4),
    ("hybrid", "zigzag"): (2, 4),
    (OVERLAPPED, "contiguous"): (2, 3, 4),
    (OVERLAPPED, "zigzag"): (2, 3, 4),
}
LENGTHS = (
    (1,),
    (1, 2, 3),
    (1, 1, 1, 1, 1, 1, 1),
    (37,),  # straddles every cut
    (3, 41, 2, 1, 9),  # one straddles, others lie inside
    (16, 8, 24),  # cuts at document edges
)
HEADS = {2: ((4, 2), (8, 2), (8, 1)), 3: ((6, 3), (12, 4), (6, 2)), 4: ((4, 2), (8, 2), (8, 1), (12, 3))}


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    mixer: str
    index: str
    size: int
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    sink: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def padded(self) -> tuple[int, ...]:
        """Document lengths with the pads of the layout."""
        if self.size == 1:
            return self.lengths
        if self.index == "zigzag":
            return tuple(-(-length // (2 * self.size)) * 2 * self.size for length in self.lengths)
        tail = -sum(self.lengths) % self.size
        return self.lengths + (tail,) * (tail > 0)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.padded]).cumsum(0).int()


def grid() -> list[Case]:
    """Every form at every size with every length set; heads, windows and sinks in turn."""
    cases = []
    for (mixer, index), sizes in FORMS.items():
        for size in sizes:
            for number, lengths in enumerate(LENGTHS):
                heads, kv_heads = HEADS[size][number % len(HEADS[size])]
                case = Case(mixer, index, size, lengths, heads, kv_heads, seed=len(cases))
                window = (1, 2, 3, 8, 16, 100)[(number + size) % 6]
                cases += [case, replace(case, window=window, sink=number % 2 == 0)]
    return cases


def meshes(rank: int, ranks: int, device: torch.device) -> dict[str, Mesh]:
    """A mesh for hybrid rows and one for all others; every group is made here, on every rank in the same order."""
    hybrid = Layout(cp=ranks, mixer="hybrid", ulysses=2)
    found = {
        "hybrid": Mesh(hybrid, ranks=ranks, rank=rank, device=device),
        "plain": Mesh(Layout(cp=ranks), ranks=ranks, rank=rank, device=device),
    }
    for mesh in found.values():
        for size in range(1, ranks + 1):
            mesh.group(0, size)
    return found


def info_of(case: Case, mesh: Mesh) -> SeqInfo | None:
    """This rank's info, None on a rank that the row does not use."""
    group = mesh.group(0, case.size)
    return None if group.rank < 0 else make_seqinfo(case.index, case.cu_seqlens, group)


def mixer_of(case: Case, transport: Transport | None = None) -> Mixer:
    name = "gather" if case.mixer == OVERLAPPED else case.mixer
    layout = Layout(cp=4, mixer=name, ulysses=2 if name == "hybrid" else None)  # pyright: ignore[reportArgumentType]  names from FORMS
    return make_mixer(layout, transport or (Late() if case.mixer == OVERLAPPED else None))


def stream(case: Case) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the sink if any, and the gradient of out, over the whole stream, in f64 rounded to the dtype."""
    generator = torch.Generator().manual_seed(case.seed)
    total = sum(case.padded)
    shapes = [(total, case.heads, 8), (total, case.kv_heads, 8), (total, case.kv_heads, 8), (total, case.heads, 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]
    sink = [torch.randn(case.heads, generator=generator, dtype=torch.float64).to(case.dtype)] if case.sink else []
    return [*tensors[:3], *sink], tensors[3]


def definition(case: Case) -> list[Tensor]:
    """out, dq, dk, dv, dsink of the naive attention, in f64."""
    inputs, dout = stream(case)
    leaves = [x.double().requires_grad_() for x in inputs]
    lengths = torch.tensor(case.padded)
    out = naive.attention(
        *leaves[:3],
        position=torch.cat([torch.arange(n) for n in case.padded]),
        segment=torch.arange(len(case.padded)).repeat_interleave(lengths),
        scale=SCALE,
        window=case.window,
        sink=leaves[3] if case.sink else None,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def run(
    case: Case,
    info: SeqInfo,
    *,
    kernel: Kernel = REFERENCE,
    plant: Callable[[object], object] | None = None,
    change: int | None = None,
    transport: Transport | None = None,
) -> list[Tensor]:
    """out, dq, dk, dv of this rank's rows, and the dsink summed over ranks.

    plant: breaks what `prepare` made. change: stream position of a token whose q, k, v are changed.
    """
    inputs, dout = stream(case)
    if change is not None:
        for x in inputs[:3]:
            x[change] += 1
    leaves = [x[info.index].requires_grad_() for x in inputs[:3]] + [x.requires_grad_() for x in inputs[3:]]
    mixer = mixer_of(case, transport)
    prepared = mixer.prepare(info, torch.device("cpu"))
    if plant is not None:
        prepared = plant(prepared)
    sink = leaves[3] if case.sink else None
    out = mixer.attend(*leaves[:3], prepared, scale=SCALE, window=case.window, sink=sink, kernel=kernel)
    grads = list(torch.autograd.grad(out, leaves, dout[info.index]))
    if case.sink and info.size > 1:
        dist.all_reduce(grads[3], group=info.group.group)
    return [out.detach(), *grads]


def errors_of(found: list[Tensor], expected: list[Tensor], info: SeqInfo) -> list[float]:
    """Relative L2 errors, tensor by tensor; expected is over the whole stream (dsink is whole on both sides)."""
    errors = []
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        b_mine = b[info.index] if number < 4 else b
        errors.append(float((a.double() - b_mine).norm() / b_mine.norm().clamp_min(1.0)))
    return errors
