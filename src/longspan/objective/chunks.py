"""The head's plumbing: which rows, how many at a time, and the three matmuls in the right precision.

`HeadInputs` checks shapes once and holds what the rows are asked for; `HeadMatmul` forms a chunk of logits [C, V] and,
in backward, adds that chunk's part to dhidden [T, E], dW [V, E], db [V]. Used by logprob.py, head_loss.py and
teacher.py.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.layout.travel import sent
from longspan.objective import head_rows
from longspan.objective.head_rows import Rows

__all__ = ["GradientSink", "HeadInputs", "HeadMatmul", "chunk_rows", "kernels_for", "plan_chunks"]

# Bytes of one chunk of logits. CPU: 512 rows at V = 32k in fp32. CUDA: 2,048 rows at V = 152k, where the matmuls are
# at speed.
BUDGET_BYTES = {"cpu": 64 * 2**20, "cuda": 1200 * 2**20}
TILE = 128  # rows of a matmul's tile on a GPU: 2,071 rows at a time take 3 % longer than 2,048


def chunk_rows(rows: int, vocab: int, *, itemsize: int, device: str, chunk: int | str) -> int:
    """Rows of logits at a time: as given, or what the device's byte budget holds, in whole TILEs; at least 1."""
    if isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0:
        return min(chunk, max(rows, 1))
    if chunk != "auto":
        raise UserError(f"chunk={chunk!r} must be a number of rows above 0, or 'auto'.")
    fitting = BUDGET_BYTES.get(device, BUDGET_BYTES["cpu"]) // (vocab * itemsize)
    return max(1, min(rows, fitting if fitting < TILE else fitting // TILE * TILE))


def plan_chunks(rows: int, size: int) -> list[slice]:
    return [slice(a, min(a + size, rows)) for a in range(0, rows, size)]


def kernels_for(x: Tensor) -> ModuleType:
    """Row kernels for x's device: row_stats, logits_gradient, kl_stats and kl_gradient."""
    if x.device.type == "cuda" and x.dtype != torch.float64:
        from longspan.objective import logprob_triton  # triton comes with torch's CUDA builds only

        return logprob_triton
    return head_rows


def logits_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """Which tokens are computed, and what each is asked for. All but `index` is [T, ...], as given."""

    length: int  # T
    rows: int  # N, needed tokens
    index: Tensor | None  # [N] int64 on the device, None: all tokens
    targets: Tensor  # [T]
    temperature: Tensor | None  # [T]
    softcap: float | None
    topk_ids: Tensor | None  # [T, K]
    chunk_rows: int

    @classmethod
    def checked(
        cls,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        needed: Tensor | None,
        temperature: Tensor | None,
        bias: Tensor | None,
        softcap: float | None,
        teacher_ids: Tensor | None,
        chunk: int | str,
        sides: int = 1,
    ) -> "HeadInputs":
        """Checks what can be checked without reading the device. sides: chunks of logits that share the byte budget."""
        _check_head(hidden, weight, bias, softcap)
        length = hidden.shape[0]
        for name, x in {
            "targets": targets,
            "needed": needed,
            "temperature": temperature,
            "teacher_ids": teacher_ids,
        }.items():
            dims = 2 if name == "teacher_ids" else 1
            if x is not None and (x.dim() != dims or x.shape[0] != length):
                raise UserError(
                    f"head: {name} has shape {list(x.shape)}, hidden has {length} tokens. Give one entry a token."
                )
        index = None
        if needed is not None and not bool(needed.all()):  # a CPU mask: nothing waits for the device
            index = sent(needed.nonzero()[:, 0], hidden.device)
        rows = length if index is None else index.shape[0]
        itemsize = logits_dtype(hidden).itemsize * sides
        size = chunk_rows(rows, weight.shape[0], itemsize=itemsize, device=hidden.device.type, chunk=chunk)
        return cls(length, rows, index, targets, temperature, softcap, teacher_ids, size)

    def where(self, part: slice) -> Tensor | slice:
        """Token numbers of a chunk's rows."""
        return part if self.index is None else self.index[part]

    def take(self, x: Tensor, part: slice) -> Tensor:
        """x [T, ...] at a chunk's rows."""
        return x[part] if self.index is None else x.index_select(0, self.index[part])

    def row_inputs(self, part: slice, like: Tensor, *, topk_ids: Tensor | None = None) -> Rows:
        """What the kernels are asked for in a chunk; topk_ids [C, K] replaces the caller's."""
        temperature = None if self.temperature is None else self.take(self.temperature, part).to(like.dtype)
        if topk_ids is None and self.topk_ids is not None:
            topk_ids = self.take(self.topk_ids, part).clamp(
                min=0
            )  # below 0 is absent: its result and gradient are dropped
        return Rows(self.take(self.targets, part), temperature, self.softcap, topk_ids)

    def spread(self, x: Tensor) -> Tensor:
        """Results of the computed rows [N, ...] -> [T, ...], 0 elsewhere. Differentiable."""
        if self.index is None:
            return x
        return torch.zeros(self.length, *x.shape[1:], dtype=x.dtype, device=x.device).index_copy(0, self.index, x)


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"head: hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, E] and [V, E] with one E."
        )
    if hidden.dtype != weight.dtype:
        raise UserError(
            f"head: hidden is {hidden.dtype} and weight is {weight.dtype}. Cast one: the engine computes in one dtype."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(
            f"head: bias has shape {list(bias.shape)}, weight has {weight.shape[0]} rows. Give one entry an id."
        )
    if softcap is not None and not softcap > 0:
        raise UserError(f"head: softcap={softcap!r} must be above 0, or None for no cap.")


class HeadMatmul:
    """Chunks of logits and their gradients, in fp32 (fp64 for fp64) whatever the parameters' dtype.

    wide: parameters already have the logits' dtype, or stand on the CPU, where they are cast once. Else (bf16 on CUDA)
    mm and addmm read bf16 and write fp32.
    """

    __slots__ = ("_bias", "_hidden", "_parameters", "_weight", "like", "wide")

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = logits_dtype(hidden)
        self.like = torch.empty(0, dtype=dtype, device=hidden.device)
        self.wide = hidden.dtype == dtype or hidden.device.type == "cpu"
        self._hidden, self._parameters = hidden, (weight, bias)
        self._weight = weight.to(dtype) if self.wide else weight
        self._bias = None if bias is None else bias.to(dtype)

    def buffer(self, rows: int) -> Tensor:
        """The one chunk of logits, [rows, V]."""
        return self.like.new_empty(rows, self._weight.shape[0])

    def logits(self, h: Tensor, buffer: Tensor) -> Tensor:
        """h [C, E] -> raw logits [C, V] in the buffer, bias added."""
        z = buffer[: h.shape[0]]
        if self.wide:
            torch.mm(h.to(z.dtype), self._weight.t(), out=z)
        else:
            torch.mm(h, self._weight.t(), out_dtype=z.dtype, out=z)
        return z if self._bias is None else z.add_(self._bias)

    def gradients(self, *, hidden: bool, weight: bool, bias: bool) -> "GradientSink":
        return GradientSink(self, self._hidden, self._parameters, wants=(hidden, weight, bias))

    def pull(self, d: Tensor, *, out: Tensor | None = None) -> Tensor:
        """d [C, V] -> its part of dhidden [C, E]."""
        return torch.mm(d, self._weight) if out is None else torch.mm(d, self._weight, out=out)


class GradientSink:
    """Sums of dhidden, dW and db over chunks. What is not wanted (a frozen head, LoRA) is not computed."""

    __slots__ = ("_bias", "_hidden", "_matmul", "_parameters", "_weight")

    def __init__(
        self,
        matmul: HeadMatmul,
        hidden: Tensor,
        parameters: tuple[Tensor, Tensor | None],
        *,
        wants: tuple[bool, bool, bool],
    ) -> None:
        weight, bias = parameters
        self._matmul, self._parameters = matmul, parameters
        self._hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wants[0] else None
        self._weight = torch.zeros(weight.shape, dtype=matmul.like.dtype, device=weight.device) if wants[1] else None
        self._bias = matmul.like.new_zeros(bias.shape) if wants[2] and bias is not None else None

    def space(self, z: Tensor) -> Tensor:
        """Where a chunk's dlogits go: over the logits; where the matmuls read bf16, over the first half of each row's
        bytes (row stride 2V), so that a chunk needs no second buffer. Written row by row, upwards."""
        if self._matmul.wide:
            return z
        return z.view(self._parameters[0].dtype)[:, : z.shape[1]]

    def add(self, d: Tensor, h: Tensor, where: Tensor | slice) -> None:
        """d [C, V] dlogits from `space`, h [C, E] the chunk's hidden, where: its token numbers."""
        if self._bias is not None:
            self._bias += d.sum(0, dtype=self._bias.dtype)
        if self._hidden is not None:
            self._add_hidden(self._hidden, d, where)
        if self._weight is None:
            return
        if self._matmul.wide:
            self._weight.addmm_(d.t(), h.to(d.dtype))
        else:
            torch.addmm(self._weight, d.t(), h, out_dtype=self._weight.dtype, out=self._weight)

    def _add_hidden(self, into: Tensor, d: Tensor, where: Tensor | slice) -> None:
        if isinstance(where, slice) and into.dtype == d.dtype:
            self._matmul.pull(d, out=into[where])
        elif isinstance(where, slice):
            into[where] = self._matmul.pull(d)
        else:
            into.index_copy_(0, where, self._matmul.pull(d).to(into.dtype))

    def scale_(self, factor: Tensor) -> None:
        """Multiplies everything by a scalar, in place: the upstream gradient of a loss formed in the head."""
        for total in (self._hidden, self._weight, self._bias):
            if total is not None:
                total.mul_(factor.to(total.dtype))

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dhidden, dW, db in their parameters' dtypes."""
        weight, bias = self._parameters
        dweight = None if self._weight is None else self._weight.to(weight.dtype)
        dbias = None if self._bias is None or bias is None else self._bias.to(bias.dtype)
        return self._hidden, dweight, dbias
