"""How attention travels between the ranks of a row, and what a rank holds for that beside its own tensors.

outputs  Ulysses keeps attention's output before and after its exchange. Over symmetric memory, under selective
         recomputation, it keeps one, and one more is on its way through a layer's backward (mixers/ulysses_overlap.py,
         `keep_output`; a model with sinks takes the plain exchange). Of ring, gather and hybrid a second one is counted
         always: where they keep none it stands for what they hold of other ranks' keys, which is not counted
buffers  of symmetric memory, outside torch's allocator, as long as the engine lives (mixers/symmetric.py): SLOTS times
         what the largest travel sends to the other ranks. ulysses: (N - 1) / N of q, k and v; ring: k and v; hybrid: both,
         each in its own group; gather: gradients of k and v in fp32. Every group of ranks has its own, so dynamic CP one a size
"""

import math
from dataclasses import dataclass

from longspan.data.cost import MixerName
from longspan.data.shape import ModelShape

__all__ = ["COLLECTIVES", "SLOTS", "Travel"]

SLOTS = 3  # mixers/symmetric.py


@dataclass(frozen=True, slots=True)
class Travel:
    """symmetric: every data rank of a stage can reach the others' memory (mixers/symmetric.py), which is one host's GPUs."""

    mixer: MixerName = "ulysses"
    symmetric: bool = False
    ulysses: int = 1  # ranks of a hybrid row that swap heads
    sizes: tuple[int, ...] = ()  # that dynamic CP deals; none: rows are of one size

    def one_output(self, shape: ModelShape, recompute: str) -> bool:
        """Whether a layer that runs once keeps attention's output once, in a row of several ranks."""
        return self.symmetric and self.mixer == "ulysses" and not shape.sinks and recompute == "selective"

    def buffers(self, shape: ModelShape, bytes_per_value: int, tokens: int, size: int) -> float:
        """Bytes, with rows of `tokens` tokens a rank."""
        if not self.symmetric or not shape.attention_layers:
            return 0.0
        sent = sum(self._sent(shape, bytes_per_value, each) for each in self.sizes or (size,) if each > 1)
        return SLOTS * sent * tokens

    def _sent(self, shape: ModelShape, bytes_per_value: int, size: int) -> float:
        """Bytes a token that the largest travel takes to other ranks, of both groups of a hybrid."""
        swapping = {"ulysses": size, "hybrid": math.gcd(self.ulysses, size)}.get(self.mixer, 1)
        # KV heads travel to every rank that needs them: mixers/ulysses.py, kv_heads_by_rank
        slots = shape.heads // math.gcd(shape.heads // swapping, shape.heads // shape.kv_heads)
        swapped = 0.0 if shape.sinks else (shape.heads + 2 * slots) * (swapping - 1) / swapping * bytes_per_value
        width = max(4, bytes_per_value) if self.mixer == "gather" else bytes_per_value
        return shape.head_dim * (swapped + (2 * slots * width if swapping < size else 0))


COLLECTIVES = Travel()
