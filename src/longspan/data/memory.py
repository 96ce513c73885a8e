"""Memory model: peak bytes of one rank, by cause, for a number of tokens in its largest micro-step.

Always there: fp32 masters, gradients and the optimizer's moments, sharded over all ranks (offload "parameters" keeps all
three on the host, "optimizer" the moments). On top, the largest of four moments (`moments`):

    head   the output layer: all that autograd keeps, the final hidden states and their gradient, one chunk of fp32 logits,
           the output layer's fp32 gradient
    layer  the last layer's backward: all that autograd keeps, that layer's tensors where they are made again, its
           gradients; the output layer's gradient in compute precision
    root   the end of backward: the embeddings' gradient and its reduction in fp32; autograd keeps nothing any more
    step   clipping's fp64 copies of the largest weight, or AdamW's temporaries

FSDP holds two layers gathered in compute precision, and the root (embeddings, output layer) all along. What autograd keeps
of a layer: data/activations.py, read off transformers' modules and held against saved-tensor hooks and the allocator of an
H200 (docs/planning.md). `slack`: the allocator's rounding, and what is small. `travel buffers`: outside the allocator
(data/travel.py). Pure CPU. backend="megatron" holds other things: data/stage_memory.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from longspan.data.activations import Activations
from longspan.data.cost import Recompute
from longspan.data.shape import ModelShape
from longspan.data.travel import COLLECTIVES, Travel
from longspan.errors import UserError

GIB = 2**30
HEAD_CHUNK_BYTES = 1200 * 2**20  # objective/chunks.py on CUDA
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and NCCL workspaces: outside the allocator
ROOM = 0.94  # share of a GPU's memory to plan with: the rest is fragments and what the model does not see
HOST_BUCKETS = 2 * 256 * 2**20  # bytes of parameters whose moments are on the device at a time: fsdp/host_optimizer.py


class Parts(Protocol):
    """What a budget is searched with."""

    def parts(self, tokens: int, size: int = 1) -> dict[str, float]:
        """Bytes by cause at the peak."""
        ...

    def peak(self, tokens: int, size: int = 1) -> float:
        """Their sum."""
        ...


def token_budget(model: Parts, memory_gib: float, *, size: int, where: str, ways: Callable[[float], str]) -> int:
    """Most tokens a rank may hold in one micro-step within ROOM of the memory. Refuses where not even 128 fit: `where`
    names the ranks, `ways` what would help beside more memory, from the bytes there are."""
    room = (ROOM * memory_gib - CONTEXT_GIB) * GIB
    least = 128
    if model.peak(least, size) > room:
        need = (model.peak(least, size) / GIB + CONTEXT_GIB) / ROOM
        parts = model.parts(least, size)
        largest = ", ".join(f"{n} {parts[n] / GIB:.1f}" for n in sorted(parts, key=lambda n: -parts[n])[:3])
        raise UserError(
            f"{memory_gib:.1f} GiB a GPU are too little for this model on {where}: {need:.1f} GiB with {least} tokens "
            f"({largest}). Use at least {need:.1f} GiB, {ways(room)}."
        )
    low, high = least, 2 * least
    while model.peak(high, size) <= room and high < 2**31:
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if model.peak(middle, size) <= room else (low, middle)
    return low // 128 * 128


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes of a rank. `parts` by cause; `peak` their sum; `budget` turns a GPU's memory into tokens."""

    shape: ModelShape
    num_ranks: int
    recompute: Recompute = "selective"
    offload: tuple[str, ...] = ()
    bytes_per_value: int = 2  # of compute: 2 bf16, 4 fp32, 8 fp64
    trainable_share: float = 1.0  # of the weights
    head_trained: bool = True  # the output layer and the embeddings get a gradient
    moments_per_weight: int = 2  # 2 AdamW, 0 plain SGD
    visual_share: float = 0.0  # visual tokens, of all
    lora_width: int = (
        0  # inputs and ranks of the adapted linear layers of one decoder layer, summed; the rest is frozen
    )
    compile: bool = False
    ep: int = 1  # ranks that share the experts: each gathers its own
    mlp_tile: int = 0  # tokens of a tile; 0: MLPs run on whole rows
    plain_delta: bool = False  # recurrent layers run on plain torch, not on fla
    travel: Travel = COLLECTIVES
    head_chunk_bytes: int = HEAD_CHUNK_BYTES
    slack: float = 0.01

    def activations(self, tokens: int) -> Activations:
        """What autograd keeps a token, on a rank with so many."""
        return Activations(
            self.shape,
            self.bytes_per_value,
            compile=self.compile and "checkpoints" not in self.offload,
            lora_width=self.lora_width,
            plain_delta=self.plain_delta,
            tiled=0 < self.mlp_tile < tokens,
            travel=self.travel,
        )

    def parts(self, tokens: int, size: int = 1) -> dict[str, float]:
        """Bytes by cause at the peak, with `tokens` tokens on the rank (pads included), in a row of `size` ranks."""
        static = self._static()
        moments = self.moments(tokens, size)
        found = static | max(moments.values(), key=lambda parts: sum(parts.values()))
        return found | {"slack": self.slack * sum(found.values()), "travel buffers": self.buffers(tokens, size)}

    def moments(self, tokens: int, size: int = 1) -> dict[str, dict[str, float]]:
        """Beside what is always there: bytes by cause at each moment that may be the peak."""
        shape, b, wide = self.shape, self.bytes_per_value, max(4, self.bytes_per_value)
        activations = self.activations(tokens)
        kept = {
            "gathered": self._gathered(),
            "activations": tokens * activations.kept(self.recompute, size, offload="checkpoints" in self.offload),
            "vision": self._vision(tokens),
        }
        layer = self._layer_weights
        held = self._cast * shape.vocab * shape.hidden if self.head_trained else 0.0
        reducing = layer * self._trained_layers * (b + 2 * wide)  # its gradient, and the one before it being reduced
        exchange = self._exchange(tokens, size)
        return {
            "head": kept | {"head": self._head(tokens)},
            "layer": kept
            | {
                "layer": tokens * activations.backward(self.recompute, size) + self._tile(tokens),
                "layer gradients": reducing + held,
                "exchange": exchange,
            },
            "root": {"root gradients": self._root_gradients(), "gathered": kept["gathered"]},
            "step": {"step": self._step()},
        }

    def peak(self, tokens: int, size: int = 1) -> float:
        return sum(self.parts(tokens, size).values())

    def buffers(self, tokens: int, size: int = 1) -> float:
        """Of symmetric memory, always there: in `parts` and `peak`, but not of the allocator, whose peaks leave them out."""
        return self.travel.buffers(self.shape, self.bytes_per_value, tokens, size)

    def budget(self, memory_gib: float, *, size: int = 1) -> int:
        """Most tokens a rank may hold in one micro-step within ROOM of the memory; refuses where not even 128 fit."""
        return token_budget(self, memory_gib, size=size, where=f"{self.num_ranks} ranks", ways=self._ways)

    def _ways(self, room: float) -> str:
        return f"{self._enough_ranks(room)}, or offload=('optimizer', 'parameters')"

    def _enough_ranks(self, room: float) -> str:
        sharded = sum(self._static().values()) * self.num_ranks
        fixed = self.peak(128) - sharded / self.num_ranks
        if fixed >= room:
            return "a larger GPU (more ranks would not help: the gathered layers alone do not fit)"
        return f"or at least {-(-sharded // (room - fixed)):.0f} ranks"

    def _static(self) -> dict[str, float]:
        weights, trained = self.shape.weights / self.num_ranks, self.trainable_share
        master = max(4, self.bytes_per_value)
        here = 0.0 if "parameters" in self.offload else 1.0
        moments = 0.0 if "optimizer" in self.offload else here * self.moments_per_weight
        return {
            "parameters": here * master * weights,
            "gradients": here * master * trained * weights,
            "optimizer": moments * master * trained * weights,
        }

    @property
    def _layer_weights(self) -> float:
        """Of one decoder layer, as a rank gathers it."""
        shape, layers = self.shape, max(1, self.shape.layers)
        routed = shape.moe_layers * shape.experts * 3 * shape.expert_mlp * shape.hidden * (1.0 - 1.0 / self.ep)
        return (shape.weights - shape.embedding_weights - shape.vision_weights - routed) / layers

    @property
    def _trained_layers(self) -> float:
        """Share of a layer's weights that get a gradient."""
        return 1.0 if self.lora_width == 0 and self.trainable_share > 0 else self.trainable_share

    @property
    def _cast(self) -> int:
        """Bytes of a gathered weight; on one rank in master precision the shard itself is used."""
        return self.bytes_per_value if self.bytes_per_value < 4 or self.num_ranks > 1 else 0

    def _gathered(self) -> float:
        return self._cast * (2 * self._layer_weights + self.shape.embedding_weights)

    def _root_gradients(self) -> float:
        """Of embeddings and output layer: one in compute precision each, and copies in fp32 that are summed over ranks."""
        if not self.head_trained:
            return 0.0
        master = max(4, self.bytes_per_value)
        dense = 2 * self.shape.vocab * self.shape.hidden * self.bytes_per_value
        reduced = self.shape.embedding_weights * master * (1 + (2 if self.num_ranks == 1 else 1 / self.num_ranks))
        return max(dense, reduced)

    def _step(self) -> float:
        """Clipping squares each shard in fp64; AdamW's square roots are a copy of all shards."""
        trained = self.shape.weights * self.trainable_share / self.num_ranks
        largest = self.shape.vocab * self.shape.hidden / self.num_ranks if self.head_trained else self._layer_weights
        on_host = "parameters" in self.offload
        stepped = min(trained * 4, HOST_BUCKETS) * 3 if "optimizer" in self.offload else trained * 4
        return 0.0 if on_host else max(min(largest, trained) * 16, stepped)

    def _head(self, tokens: int) -> float:
        """Final norm, hidden states and their gradient, a chunk of logits and losses of all tokens, dW in fp32."""
        shape, b = self.shape, self.bytes_per_value
        wide = max(4, b)
        rows = tokens * (shape.hidden * (2 * b + wide + b) + 6 * wide)
        chunk = min(self.head_chunk_bytes, tokens * shape.vocab * wide)
        gradient = shape.vocab * shape.hidden * wide if self.head_trained else 0.0
        return rows + max(chunk, gradient * b / wide) + gradient

    def _tile(self, tokens: int) -> float:
        """One tile's gate, up, activation, product and their gradients; the three matrices' gradients add up in fp32."""
        shape = self.shape
        if not 0 < self.mlp_tile < tokens:
            return 0.0
        return 7.0 * self.mlp_tile * shape.mlp * self.bytes_per_value + 3.0 * shape.mlp * shape.hidden * 4

    def _exchange(self, tokens: int, size: int) -> float:
        if size == 1:
            return 0.0
        heads = self.shape.heads + 2 * max(self.shape.kv_heads, size)
        return 2.0 * tokens * heads * self.shape.head_dim * self.bytes_per_value

    def _vision(self, tokens: int) -> float:
        """The tower's tensors of this rank's share of the images, its pixels, and the features placed among the tokens."""
        vision, b = self.shape.vision, self.bytes_per_value
        if vision is None or not self.visual_share:
            return 0.0
        visual = tokens * self.visual_share
        features = (1 + vision.deepstack) * 2 * self.shape.hidden * b
        pixels = vision.patch_values * (4 + b) + 3 * vision.hidden * b
        patch = self.activations(tokens).vision_patch(self.recompute) + pixels
        return visual * (vision.merge * patch + features)
