"""From a batch to its plan: the limits that a model, a layout and a budget set, and the cost that ranks plans.

The same inputs on every rank give the same plan (law 2). Does not know tensors or process groups.
"""

from longspan.data import Limits, Plan, make_plan
from longspan.engine.batch import Batch
from longspan.engine.config import EngineConfig
from longspan.layout import Layout, Mesh
from longspan.layout.resolve import ulysses_refusal
from longspan.models.adapter import Adapter

__all__ = ["Planner", "cp_sizes"]

CPU_BUDGET = 8192  # tokens a rank under max_tokens_per_rank="auto" without a GPU: small models, host memory


class Planner:
    """Makes plans for one engine."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh) -> None:
        self.layout = mesh.layout
        self.ranks = mesh.data_ranks
        self.budget = config.max_tokens_per_rank
        self.sizes = cp_sizes(mesh.layout, adapter, mesh.data_ranks) if config.dynamic_cp else None

    def limits(self, lengths: list[int]) -> Limits:
        """"auto" grows with the longest sample, so that it always runs; an explicit budget is hard."""
        budget = self.budget
        if budget == "auto":
            size = self.layout.cp if self.sizes is None else max(self.sizes)
            budget = max(CPU_BUDGET, -(-max(lengths) // (2 * size)) * 2)
        return Limits(self.ranks, self.layout.cp, budget, self.layout.index, self.sizes)

    def plan(self, batch: Batch) -> Plan:
        return make_plan(batch.lengths, self.limits(batch.lengths))


def cp_sizes(layout: Layout, adapter: Adapter, ranks: int) -> tuple[int, ...]:
    """CP sizes that dynamic CP may give a row: those whose heads can be dealt (ulysses, linear="heads"); else any."""
    sizes = [size for size in range(1, ranks + 1) if adapter.linear_refusal(layout.linear, size) is None]
    if layout.mixer == "ulysses":
        sizes = [size for size in sizes if ulysses_refusal(size, adapter.num_heads) is None]
    return tuple(sizes)
