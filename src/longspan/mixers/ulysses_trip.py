"""The travels of one Ulysses attention: where heads go, in which order they attend, and how they come back.

N ranks, G groups of heads; `part` cuts a rank's tokens by the rank and group of their heads, as a view:
    to_heads   x [T/N, N * G * h, D], part g [N, T/N, h, D]  ->  lands in [N, T/N, h, D], all tokens of this rank's heads
    to_tokens  x [T, h, D] of group g  ->  lands in part g of [T/N, N * G * h, D]
Ranks' tokens land in rank order; the inner attention may want another (zigzag): `ordered` gives it.
"""

from dataclasses import dataclass

from torch import Tensor

from longspan.layout.mesh import CPGroup
from longspan.mixers.attention import Work
from longspan.mixers.kernels import heads_first
from longspan.mixers.transport import Arrival, Transport
from longspan.mixers.ulysses import UlyssesPrepared, kv_heads_by_rank

__all__ = ["Trip", "plan_trip"]


@dataclass(frozen=True, slots=True, eq=False)
class Trip:
    """One attention on its ranks."""

    prepared: UlyssesPrepared
    transport: Transport
    work: Work
    groups: int  # G
    slots: tuple[int, ...]  # KV head in each KV slot, rank after rank

    @property
    def group(self) -> CPGroup:
        """The ranks of the row."""
        return self.prepared.group

    def part(self, x: Tensor, g: int) -> Tensor:
        """[T/N, N * G * h, D] -> [N, T/N, h, D]: the heads of group g, rank by rank. A view."""
        return x.unflatten(1, (self.group.size, self.groups, -1))[:, :, g].movedim(1, 0)

    def whole(self, x: Tensor) -> Tensor:
        """Room for the gradient of all groups' heads of this rank's tokens: [T, h, D] -> [T/N, N * G * h, D]."""
        return heads_first(x, x.shape[0] // self.group.size, self.group.size * self.groups * x.shape[1], x.shape[2])

    def to_heads(self, *tensors: Tensor) -> tuple[list[Tensor], list[Arrival]]:
        """Starts the travel of each group; what the tensors land in, group after group, is theirs after its wait."""
        landing: list[Tensor] = []
        coming: list[Arrival] = []
        for g in range(self.groups):
            parts = tuple(self.part(x, g) for x in tensors)
            into = tuple(part.new_empty(part.shape) for part in parts)
            coming.append(self.transport.exchange(parts, into, self.group))
            landing += into
        return landing, coming

    def to_tokens(self, tensors: tuple[Tensor, ...], into: tuple[Tensor, ...], g: int) -> Arrival:
        """Starts the travel of group g's results home, into its heads of `into`."""
        size, order = self.group.size, self.prepared.from_order
        rows = (x if order is None else x.index_select(0, order) for x in tensors)
        parts = tuple(x.unflatten(0, (size, -1)) for x in rows)
        return self.transport.exchange(parts, tuple(self.part(x, g) for x in into), self.group)

    def ordered(self, x: Tensor) -> Tensor:
        """[N, T/N, h, D] as it landed -> [T, h, D] in the order of the inner attention."""
        rows, order = x.flatten(0, 1), self.prepared.to_order
        return rows if order is None else rows.index_select(0, order)

    def attend(self, landed: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The inner attention of q, k, v as they landed: out [T, h, Dv], lse [h, T]."""
        q, k, v = (self.ordered(x) for x in landed)
        out, lse = self.prepared.inner.forward(q, k, v, self.work)
        return out.to(q.dtype), lse

    def attend_backward(
        self, dout: Tensor, landed: list[Tensor], out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the order of the inner attention; dout as it landed."""
        q, k, v = (self.ordered(x) for x in landed)
        return self.prepared.inner.backward(self.ordered(dout), q, k, v, out, lse, self.work)


def plan_trip(q: Tensor, k: Tensor, prepared: UlyssesPrepared, transport: Transport, work: Work, *, most: int) -> Trip:
    """The trip of this rank's q and k in at most `most` groups: the KV heads of a rank must divide."""
    slots = kv_heads_by_rank(q.shape[1], k.shape[1], prepared.group.size)
    kv_heads = len(slots) // prepared.group.size
    return Trip(prepared, transport, work, max(g for g in range(1, most + 1) if kv_heads % g == 0), slots)
