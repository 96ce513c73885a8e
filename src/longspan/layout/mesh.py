"""The layout of a run (`Layout`, public) and the ranks laid out by it (`Mesh`).

Global rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp: tp fastest, then cp, dp, pp, as megatron-core counts.
A data rank is dp * cp_size + cp. Dynamic CP cuts the data ranks into runs; each run that a plan uses gets one process
group, made once. Groups are collective: every rank asks for every row's group, in plan order, also for rows of others.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.errors import UserError
from longspan.typed import typed

__all__ = ["CPGroup", "Layout", "Mesh"]

MIXERS = ("auto", "ulysses", "ring", "gather", "hybrid")
INDICES = ("auto", "contiguous", "zigzag")
LINEARS = ("auto", "state", "heads")
MOST_RANKS = 2**20  # on one axis: a larger size is a slip of the pen


@typed
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks work along each axis, and how tokens meet across them. ranks = dp * cp * tp * pp."""

    dp: int = 1  # ranks with different samples
    cp: int = 1  # ranks that share the tokens of one stream
    tp: int = 1  # ranks that share the columns of a matrix (backend="megatron")
    pp: int = 1  # ranks that share the layers (backend="megatron")
    vpp: int = 1  # layer chunks a pipeline rank holds
    ep: int = 1  # ranks that share the experts, out of dp * cp * tp
    etp: int = 1  # ranks that share the columns of an expert
    sequence_parallel: bool = False  # norms and dropout on 1/tp of the tokens
    mixer: Literal["auto", "ulysses", "ring", "gather", "hybrid"] = "auto"
    index: Literal["auto", "contiguous", "zigzag"] = "auto"
    ulysses: int | None = None  # ulysses part of mixer="hybrid"; None: the largest that the heads allow
    linear: Literal["auto", "state", "heads"] = "auto"  # how recurrent layers cross ranks

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if size < 1:
                raise UserError(f"layout {axis}={size!r} must be an integer of at least 1")
            if size > MOST_RANKS:
                raise UserError(
                    f"layout {axis}={size} is above {MOST_RANKS}, the most an axis can have. Use fewer ranks."
                )
        self._check_expert_axes()
        self._check_pipeline()
        self._check_ulysses()

    def _check_expert_axes(self) -> None:
        pool = self.dp * self.cp * self.tp
        if pool % (self.ep * self.etp):
            raise UserError(
                f"ep * etp = {self.ep} * {self.etp} = {self.ep * self.etp} must divide "
                f"dp * cp * tp = {self.dp} * {self.cp} * {self.tp} = {pool}: experts live across those ranks. "
                f"Change ep or etp, or run more ranks."
            )

    def _check_pipeline(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise UserError(f"vpp={self.vpp} needs pp > 1, got pp=1. Set vpp=1 or use pipeline ranks.")
        if self.sequence_parallel and self.tp == 1:
            raise UserError("sequence_parallel=True needs tp > 1, got tp=1. Leave it out or set tp.")

    def _check_ulysses(self) -> None:
        if self.mixer != "hybrid":
            if self.ulysses is not None:
                raise UserError(
                    f"ulysses={self.ulysses} is the ulysses part of mixer='hybrid', got mixer={self.mixer!r}"
                )
            return
        parts = ulysses_parts(self.cp)
        if not parts:
            raise UserError(
                f"mixer='hybrid' needs cp = ulysses * ring with both above 1, got cp={self.cp}. "
                f"Use mixer='ulysses' or 'ring', or a cp such as 4."
            )
        if self.ulysses is not None and self.ulysses not in parts:
            raise UserError(
                f"ulysses={self.ulysses} must divide cp={self.cp} and leave a ring. Use ulysses in {parts}."
            )

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> size, in the order of names."""
        return {
            "dp": self.dp,
            "cp": self.cp,
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp,
            "ep": self.ep,
            "etp": self.etp,
        }

    @property
    def ranks(self) -> int:
        """How many ranks this layout runs on."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def equation(self) -> str:
        """The product behind `ranks`, for messages."""
        return f"dp * cp * tp * pp = {self.dp} * {self.cp} * {self.tp} * {self.pp} = {self.ranks}"

    @property
    def name(self) -> str:
        """Short form that `parse_layout` reads back, such as "dp2-cp4-hybrid"."""
        words = [f"{axis}{size}" for axis, size in self.axes.items() if size > 1]
        words += ["sp"] if self.sequence_parallel else []
        words += [value for value in (self.mixer, self.index, self.linear) if value != "auto"]
        words += [f"u{self.ulysses}"] if self.ulysses is not None else []
        return "-".join(words) or "dp1"


def ulysses_parts(cp: int) -> tuple[int, ...]:
    """The ulysses sizes that split cp into ulysses * ring with both above 1."""
    small = [u for u in range(2, math.isqrt(cp) + 1) if cp % u == 0]
    return tuple(sorted({*small, *(cp // u for u in small)}))


@dataclass(frozen=True, slots=True)
class CPGroup:
    """The ranks that share one stream. A rank outside has rank -1; one rank alone needs no process group."""

    group: dist.ProcessGroup | None
    rank: int  # this rank inside the group, -1 outside
    size: int
    ranks: tuple[int, ...]  # global ranks, in order
    parts: "tuple[CPGroup, CPGroup] | None" = None  # hybrid: (ulysses group, ring group) of this rank

    @classmethod
    def alone(cls, rank: int = 0) -> "CPGroup":
        """A group of one."""
        return cls(None, 0, 1, (rank,))


class Mesh:
    """Where this rank stands in a resolved layout, and the groups it shares with others."""

    def __init__(self, layout: Layout, *, ranks: int, rank: int, device: torch.device) -> None:
        if layout.ranks != ranks:
            raise UserError(
                f"layout {layout.name} needs {layout.equation} ranks, but {ranks} run. "
                f"Start {layout.ranks} processes or change the layout."
            )
        self.layout = layout
        self.ranks = ranks
        self.rank = rank
        self.device = device
        self.data_ranks = layout.dp * layout.cp
        self.data_rank = rank // layout.tp % self.data_ranks
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._runs: dict[tuple[int, int], CPGroup] = {}

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """One axis "fsdp" over all dp x cp ranks: parameters are cut over it, so groups may form in any way. Collective at
        first use; only without tp and pp."""
        if self.layout.tp * self.layout.pp > 1:
            raise UserError(f"layout {self.layout.name}: a device mesh of dp and cp needs tp=1 and pp=1")
        return init_device_mesh(self.device.type, (self.data_ranks,), mesh_dim_names=("fsdp",))

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Axes "replica" and "ep" over the data ranks: ep neighbours share a set of experts. Collective at first use."""
        shape = (self.data_ranks // self.layout.ep, self.layout.ep)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replica", "ep"))

    @cached_property
    def all(self) -> CPGroup:
        """All data ranks. Collective at first use."""
        return self._make_group(tuple(range(self.data_ranks)))

    @cached_property
    def host_group(self) -> dist.ProcessGroup | None:
        """All ranks, for small objects on the host; None when there is one. Collective at first use."""
        return self._process_group(tuple(range(self.ranks)))

    def gather_objects(self, mine: object) -> list[Any]:
        """What every rank passed, rank 0 first. Collective; small picklable objects only."""
        if self.host_group is None:
            return [mine]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.host_group)
        return found

    def group(self, start: int, size: int) -> CPGroup:
        """Data ranks start .. start + size - 1. Collective at first use: every rank calls it, inside or not."""
        key = (start, size)
        if key not in self._runs:
            assert start >= 0 and size >= 1 and start + size <= self.data_ranks, (start, size, self.data_ranks)
            group = self._make_group(tuple(range(start, start + size)))
            if self.layout.mixer == "hybrid":
                group = dataclasses.replace(group, parts=self._hybrid_parts(start, size))
            self._runs[key] = group
        return self._runs[key]

    def experts(self) -> CPGroup:
        """The ep consecutive data ranks that share this rank's experts. Collective at first use; only without tp."""
        assert self.layout.tp == 1, "expert groups across tensor-parallel ranks belong to the megatron backend"
        size = self.layout.ep
        groups = [self._make_group(tuple(range(start, start + size))) for start in range(0, self.data_ranks, size)]
        return groups[self.data_rank // size]

    def _hybrid_parts(self, start: int, size: int) -> tuple[CPGroup, CPGroup] | None:
        """Ulysses ranks lie next to each other (low order), ring ranks `ulysses` apart."""
        ulysses = hybrid_ulysses(self.layout, size)
        stop = start + size
        rows = [self._make_group(tuple(range(i, i + ulysses))) for i in range(start, stop, ulysses)]
        columns = [self._make_group(tuple(range(start + i, stop, ulysses))) for i in range(ulysses)]
        if not start <= self.data_rank < stop:
            return None
        offset = self.data_rank - start
        return rows[offset // ulysses], columns[offset % ulysses]

    def _make_group(self, data_ranks: tuple[int, ...]) -> CPGroup:
        """One process group per (pp, tp) slice, made on every rank in the same order; returns this rank's slice."""
        mine = None
        for stage in range(self.layout.pp):
            for column in range(self.layout.tp):
                base = stage * self.data_ranks
                ranks = tuple((base + data_rank) * self.layout.tp + column for data_rank in data_ranks)
                group = self._process_group(ranks)
                if self.rank // (self.data_ranks * self.layout.tp) == stage and self.rank % self.layout.tp == column:
                    inside = self.rank in ranks
                    mine = CPGroup(
                        group=group if inside else None,
                        rank=ranks.index(self.rank) if inside else -1,
                        size=len(ranks),
                        ranks=ranks,
                    )
        assert mine is not None
        return mine

    def _process_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            group = dist.new_group(list(ranks), use_local_synchronization=False)
            self._groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None  # int: this rank is outside
        return self._groups[ranks]


def hybrid_ulysses(layout: Layout, size: int) -> int:
    """The ulysses part of a group of `size` ranks (dynamic CP makes smaller ones): what both sizes have in common."""
    assert layout.mixer == "hybrid" and layout.ulysses is not None, "resolve the layout first"
    return math.gcd(layout.ulysses, size)
