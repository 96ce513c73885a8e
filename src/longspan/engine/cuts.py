"""Layouts of backend="megatron" that a model can run on so many GPUs, by its shape alone: for `longspan plan`, before any weight
is read. The backend itself checks the model again (megatron/shape.py). Pure.
"""

from collections.abc import Iterator

from longspan.data.shape import ModelShape
from longspan.engine.megatron.shape import FAMILIES, divides
from longspan.errors import UserError
from longspan.layout import Layout

__all__ = ["check_cut", "check_family", "cut_layouts"]

CHUNKS = (1, 2)  # vpp that are tried


def check_family(architectures: object) -> None:
    """Raises UserError for a model that the backend has no weight table for."""
    family = architectures[0] if isinstance(architectures, list) and architectures else None
    if family not in FAMILIES:
        raise UserError(
            f"backend='megatron' has no weight table for {family or 'a config without architectures'}. Known: {', '.join(FAMILIES)}"
        )


def check_cut(shape: ModelShape, layout: Layout) -> None:
    """Raises UserError, with the sizes that work, for what this backend refuses."""
    for total, what in (
        (shape.kv_heads, "KV heads"),
        (shape.heads, "query heads"),
        (shape.mlp if shape.layers > shape.moe_layers else 0, "MLP columns"),
        (shape.linear_key_heads, "key heads of its recurrent layers"),
    ):
        if total:
            divides("tp", layout.tp, total, what)
    stages = layout.pp * layout.vpp
    divides("pp * vpp", stages, shape.layers, "layers")
    deepest = shape.vision.deepstack if shape.vision is not None else 0
    if deepest > shape.layers // stages:
        raise UserError(
            f"pp * vpp = {stages} cuts the first {deepest} layers, which take DeepStack features. Use pp * vpp of at most "
            f"{shape.layers // deepest}"
        )
    data = layout.dp * layout.cp
    if data % layout.ep or (shape.experts and shape.experts % layout.ep):
        spread = f"and the model's {shape.experts} experts" if shape.experts else "(the model has no experts: set ep=1)"
        raise UserError(f"ep={layout.ep} must divide dp * cp = {data} {spread}")
    if layout.etp > 1 and not shape.experts:
        raise UserError(f"etp={layout.etp} cuts experts, and the model has no experts. Set etp=1")
    if layout.etp not in (1, layout.tp):
        raise UserError(f"etp={layout.etp} must be 1 or tp={layout.tp}")


def cut_layouts(shape: ModelShape, gpus: int, node_ranks: int) -> Iterator[Layout]:
    """Every sensible one: tp inside a node and with sequence parallelism, experts spread as far as they go or not at all."""
    for tp in (n for n in _divisors(gpus) if n <= node_ranks):
        for pp in _divisors(gpus // tp):
            for cp in _divisors(gpus // (tp * pp)):
                dp = gpus // (tp * pp * cp)
                spread = max(n for n in _divisors(dp * cp) if not shape.experts or shape.experts % n == 0)
                for vpp in CHUNKS if pp > 1 else (1,):
                    for ep, etp in {(1, 1), (spread, 1), (spread, tp)} if shape.experts else ((1, 1),):
                        layout = Layout(dp=dp, cp=cp, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, sequence_parallel=tp > 1)
                        if _fits(shape, layout):
                            yield layout


def _fits(shape: ModelShape, layout: Layout) -> bool:
    try:
        check_cut(shape, layout)
    except UserError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
