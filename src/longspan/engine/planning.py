"""From a batch to its plan: the limits that a model, a layout and a budget set, and the cost that ranks plans.

The same inputs on every rank give the same plan (law 2). Does not know tensors or process groups.
"""

from longspan.data import Limits, Plan, make_plan
from longspan.engine.batch import Batch
from longspan.engine.config import EngineConfig
from longspan.errors import UserError
from longspan.layout import Layout, Mesh
from longspan.layout.resolve import ulysses_refusal
from longspan.models.adapter import Adapter

__all__ = ["Planner", "cp_sizes", "heads_per_rank"]

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
    heads, _ = heads_per_rank(layout, adapter)
    sizes = [size for size in range(1, ranks + 1) if adapter.linear_refusal(layout.linear, size) is None]
    if layout.mixer == "ulysses":
        sizes = [size for size in sizes if ulysses_refusal(size, heads) is None]
    return tuple(sizes)


def heads_per_rank(layout: Layout, adapter: Adapter) -> tuple[int, int]:
    """(query heads, KV heads) of a tensor-parallel rank: what mixers may deal. Raises UserError with the sizes that work."""
    if adapter.num_kv_heads % layout.tp or adapter.num_heads % layout.tp:
        sizes = ", ".join(str(n) for n in range(1, adapter.num_kv_heads + 1) if adapter.num_kv_heads % n == 0)
        raise UserError(
            f"tp={layout.tp} must divide the model's {adapter.num_heads} query and {adapter.num_kv_heads} KV heads. "
            f"Use tp in ({sizes})"
        )
    return adapter.num_heads // layout.tp, adapter.num_kv_heads // layout.tp
