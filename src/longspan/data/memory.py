"""Memory model: peak bytes of one rank, by cause, for a number of tokens in its largest micro-step.

    parameters   fp32 masters, sharded over all ranks; offload "parameters" keeps them on the host
    gradients    fp32, sharded; the optimizer's two moments likewise (offload "optimizer")
    gathered     the units that FSDP holds whole: the root (embeddings, head) for the step, two layers in turn, and what
                 one layer's and the root's gradients weigh before they are scattered
    activations  what autograd keeps: under "none" every layer's tensors, else each layer's input (on the host with
                 offload "checkpoints") and, under "selective", the attention output and LSE
    layer        the one layer that is being recomputed, and its gradients
    head         final hidden states, their gradient, one chunk of fp32 logits with its gradient, as far as they pass
                 `layer`: the head is done before the layers' backward begins
    exchange     send and receive buffers of the mixer
    vision       the tower's blocks on this rank's share of the images, and the table of visual embeddings

Counted as transformers' modules keep them in eager mode (norms in fp32), which torch.compile can only lower. Pure CPU;
the test holds it against the tensors that autograd really saves. Allocator slack (blocks, fragments) is the `slack`
share.
"""

from dataclasses import dataclass

from longspan.data.cost import Recompute
from longspan.data.shape import ModelShape
from longspan.errors import UserError

GIB = 2**30
HEAD_CHUNK_BYTES = 1200 * 2**20  # objective/chunks.py on CUDA
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and NCCL workspaces: outside the allocator
ROOM = 0.94  # share of a GPU's memory to plan with: the rest is fragments and what the model does not see


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes of a rank. `parts` by cause; `peak` their sum; `budget` turns a GPU's memory into tokens."""

    shape: ModelShape
    num_ranks: int
    recompute: Recompute = "selective"
    offload: tuple[str, ...] = ()
    bytes_per_value: int = 2  # of compute: 2 bf16, 4 fp32, 8 fp64
    trainable_share: float = 1.0  # of the weights
    moments: int = 2  # per weight: 2 AdamW, 0 plain SGD
    visual_share: float = 0.0  # visual tokens, of all
    head_chunk_bytes: int = HEAD_CHUNK_BYTES
    slack: float = 0.02

    def parts(self, tokens: int, size: int = 1) -> dict[str, float]:
        """Bytes by cause with `tokens` tokens on the rank (pads included), in a row of `size` ranks."""
        static = self._static()
        moving = self._activations(tokens, size)
        moving |= {
            "head": max(0.0, self._head(tokens) - moving["layer"]),
            "exchange": self._exchange(tokens, size),
            "vision": self._vision(tokens),
        }
        total = sum(static.values()) + sum(moving.values())
        return static | moving | {"slack": self.slack * total}

    def peak(self, tokens: int, size: int = 1) -> float:
        return sum(self.parts(tokens, size).values())

    def budget(self, memory_gib: float, *, size: int = 1) -> int:
        """Most tokens a rank may hold in one micro-step within ROOM of the memory; refuses where not even 128 fit."""
        room = (ROOM * memory_gib - CONTEXT_GIB) * GIB
        least = 128
        if self.peak(least, size) > room:
            need = (self.peak(least, size) / GIB + CONTEXT_GIB) / ROOM
            raise UserError(
                f"{memory_gib:.1f} GiB a GPU are too little for this model on {self.num_ranks} ranks: {need:.1f} GiB "
                "with "
                f"{least} tokens ({self._largest(least, size)}). Use at least {need:.1f} GiB, "
                f"{self._enough_ranks(room)}, or "
                "offload=('optimizer', 'parameters')."
            )
        low, high = least, 2 * least
        while self.peak(high, size) <= room and high < 2**31:
            low, high = high, 2 * high
        while high - low > max(1, low // 256):
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle, size) <= room else (low, middle)
        return low // 128 * 128

    def _largest(self, tokens: int, size: int) -> str:
        parts = self.parts(tokens, size)
        names = sorted(parts, key=lambda name: -parts[name])[:3]
        return ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in names)

    def _enough_ranks(self, room: float) -> str:
        sharded = sum(self._static()[name] for name in ("parameters", "gradients", "optimizer")) * self.num_ranks
        fixed = self.peak(128) - sharded / self.num_ranks
        if fixed >= room:
            return "a larger GPU (more ranks would not help: the gathered layers alone do not fit)"
        return f"or at least {-(-sharded // (room - fixed)):.0f} ranks"

    def _static(self) -> dict[str, float]:
        shape, ranks, trainable = self.shape, self.num_ranks, self.trainable_share
        master = max(4, self.bytes_per_value)
        weights = shape.weights
        layer = (weights - shape.embedding_weights - shape.vision_weights) / max(1, shape.layers)
        cast = self.bytes_per_value if master != self.bytes_per_value or ranks > 1 else 0
        # Gathered copies in compute precision; gradients leave the layer in it and are reduced in fp32.
        gathered = cast * (2 * layer + shape.embedding_weights)
        gathered += trainable * (self.bytes_per_value + master) * (layer + shape.embedding_weights)
        return {
            "parameters": 0.0 if "parameters" in self.offload else master * weights / ranks,
            "gradients": master * trainable * weights / ranks,
            "optimizer": 0.0 if "optimizer" in self.offload else self.moments * master * trainable * weights / ranks,
            "gathered": gathered,
        }

    def _activations(self, tokens: int, size: int) -> dict[str, float]:
        shape, b = self.shape, self.bytes_per_value
        whole = self.layer_token_bytes(size)
        if self.recompute == "none":
            return {"activations": tokens * sum(whole), "layer": tokens * self._gradient_token_bytes()}
        kept = 0.0 if "checkpoints" in self.offload else shape.layers * shape.hidden * b
        if self.recompute == "selective":
            kept += shape.attention_layers * shape.heads * (shape.head_dim * b + 4)
        return {
            "activations": tokens * kept,
            "layer": tokens * (max(whole, default=0.0) + self._gradient_token_bytes()),
        }

    def layer_token_bytes(self, size: int = 1) -> list[float]:
        """What autograd keeps of each layer, bytes a token of the rank."""
        shape = self.shape
        softmax, linear = self._attention_token_bytes(size), self._linear_token_bytes()
        norms = 2 * (self._norm_token_bytes(shape.hidden) + shape.hidden * self.bytes_per_value)  # and their output
        mixers = [softmax] * shape.attention_layers + [linear] * shape.linear_layers
        mlps = [self._mlp_token_bytes()] * (shape.layers - shape.moe_layers)
        mlps += [self._expert_token_bytes()] * shape.moe_layers
        return [mixer + mlp + norms for mixer, mlp in zip(mixers, mlps, strict=True)]

    def _norm_token_bytes(self, width: int, heads: int = 1) -> float:
        """The input in fp32, one scale a head, and the normalised values."""
        return width * (4 + self.bytes_per_value) + 4 * heads

    def _attention_token_bytes(self, size: int) -> float:
        shape, b = self.shape, self.bytes_per_value
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        kept = (2 * queries + 2 * keys) * b + 4 * shape.heads  # q, k, v, out, LSE
        if shape.normed_queries:
            kept += self._norm_token_bytes(queries, shape.heads) + self._norm_token_bytes(keys, shape.kv_heads)
        if shape.gated_attention:
            kept += 2 * queries * b
        if size > 1:  # out before and after the exchange; k and v repeated for more ranks than heads
            kept += queries * b + 2 * max(0, size - shape.kv_heads) * shape.head_dim * b
        return kept

    def _linear_token_bytes(self) -> float:
        shape, b = self.shape, self.bytes_per_value
        keys = shape.linear_key_heads * shape.linear_head_dim
        values = shape.linear_value_heads * shape.linear_head_dim
        # convolution's input and output, q and k normed, the kernel's v, z, out, its gated norm in fp32, the gates
        return (2 * keys + values) * 4 * b + values * (4 * b + 8) + 6 * 4 * shape.linear_value_heads

    def _mlp_token_bytes(self) -> float:
        return 4 * self.shape.mlp * self.bytes_per_value  # gate, its activation, up, product

    def _expert_token_bytes(self) -> float:
        """Router, its sort, and of each chosen expert: input, gate and up, activation, product, output."""
        shape, b = self.shape, self.bytes_per_value
        router = 4 * shape.experts + 4
        chosen = 2 * shape.hidden * b + 4 * shape.expert_mlp * b + 5 * 8 + 4 + 1 + b
        return router + shape.experts_per_token * chosen + 4 * shape.shared_mlp * b

    def _gradient_token_bytes(self) -> float:
        """Gradients alive at the top of a layer's backward, where all it kept is still there: hidden, once more in
        fp32, and one of the MLP's width (its matmul's input is freed as the next appears)."""
        shape = self.shape
        wide = max(shape.mlp, shape.expert_mlp * shape.experts_per_token, shape.shared_mlp)
        return wide * self.bytes_per_value + shape.hidden * (self.bytes_per_value + 4)

    def _head(self, tokens: int) -> float:
        shape, b = self.shape, self.bytes_per_value
        wide = max(4, b)
        chunk = min(self.head_chunk_bytes, tokens * shape.vocab * wide)
        return tokens * shape.hidden * (2 * b + 2 * wide) + 2 * chunk + tokens * 6 * wide

    def _exchange(self, tokens: int, size: int) -> float:
        if size == 1:
            return 0.0
        shape = self.shape
        heads = shape.heads + 2 * max(shape.kv_heads, size)
        return 2.0 * tokens * heads * shape.head_dim * self.bytes_per_value

    def _vision(self, tokens: int) -> float:
        vision, b = self.shape.vision, self.bytes_per_value
        if vision is None or not self.visual_share:
            return 0.0
        visual = tokens * self.visual_share
        block = 2 * self._norm_token_bytes(vision.hidden) + (7 * vision.hidden + 3 * vision.mlp) * b
        kept = vision.layers * (block if self.recompute == "none" else vision.hidden * b) + block
        pixels = vision.patch_values * (4 + b)
        weights = self.shape.vision_weights * b * (2 / max(1, vision.layers))
        return visual * (vision.merge * (kept + pixels) + 3 * self.shape.hidden * b) + weights
