"""What autograd keeps of a micro-step on one rank of backend="megatron", bytes a token of the row's share of that rank.

Read off engine/megatron and megatron-core's local layers, which run eagerly. h: hidden; q, k: a tensor-parallel rank's
query and KV heads times head_dim; m: its MLP columns; b: bytes of a value; rows: 1/tp under sequence parallelism, else 1.

    norm        its input in fp32, 1 scale; the normalised values where its weight is trained (layers.Norm, ZeroNorm)
    attention   q and k after RoPE, out (b each), LSE; v is a view of the fused q, k, v, which stays whole: 3 q + 3 k
    gated       its query projection is twice as wide; the gate's sigmoid and the product: 3 q more
    MLP         gate and up (one tensor), gate's activation, up + 0.0 (megatron-core's offset), the product: 5 m. Row linears
                keep their input
    experts     repeated on every tensor-parallel rank, on all tokens; under sequence parallelism their gathered input

With recomputation a layer keeps its input (rows h b) and, under "selective", attention's out and LSE. Hidden states between
stages: what a stage sends stays with its micro-step (pipeline.Flight). Of each micro-step in flight there are also RoPE
tables and the stream's fields. Held against the allocator in tests/dist/test_stage_memory.py.
"""

from dataclasses import dataclass

from longspan.data.activations import Activations
from longspan.data.shape import ModelShape
from longspan.data.stages import Cut

__all__ = ["StageActivations"]

FIELDS = 96  # bytes a token of a stream: ids, targets, positions, segments, weights, what the losses read


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes a token. lora_columns, lora_rows: inputs of a layer's adapted column and row linears, ranks of their factors
    added; every other weight is frozen then."""

    shape: ModelShape
    cut: Cut
    bytes_per_value: int
    lora_columns: int = 0
    lora_rows: int = 0
    plain_delta: bool = False

    @property
    def own(self) -> ModelShape:
        return self.cut.own(self.shape)

    @property
    def inner(self) -> Activations:
        """What is the same module as in the fsdp backend, on this rank's heads."""
        frozen = self.lora_columns + self.lora_rows
        return Activations(self.own, self.bytes_per_value, lora_width=frozen, plain_delta=self.plain_delta)

    def kept(self, recompute: str, size: int) -> float:
        """By the layers of one virtual stage, from forward to backward."""
        own, b, stages = self.own, self.bytes_per_value, self.cut.stages
        if recompute == "none":
            return sum(self.layers(size)) / stages
        inputs = own.layers * self.cut.rows * own.hidden * b
        if recompute == "full":
            return inputs / stages
        return (inputs + own.attention_layers * (own.heads * own.head_dim * b + 4 * own.heads)) / stages

    def between(self) -> float:
        """Of one micro-step in flight, beside its layers: fields, RoPE's cosines and sines, what it sends on."""
        b, own = self.bytes_per_value, self.own
        sent = self.cut.rows * own.hidden * b if self.cut.pp > 1 else 0.0
        return FIELDS + 2 * own.head_dim * b + sent

    def backward(self, recompute: str, size: int) -> float:
        """Of the layer whose backward runs: what is made again, gradients, and what crosses ranks.

        At its top: the hidden gradient, and 2 m, since the product's gradient becomes those of its two factors (3 m) while
        its own m is let go. At the MLP's column linear, when of its 5 m there are the 2 m of its gradient: the input's
        gradient in fp32 and in b, under sequence parallelism the rows gathered and what is scattered as well. At the end of
        what is made again: the MLP's row linear, whose sum is fp32 (a recomputation stops after it, not before). Pipelines:
        the gradient received and the one to send. Plain DeltaNet: its chunks.
        """
        own, b, rows = self.own, self.bytes_per_value, self.cut.rows
        again = max(self.layers(size), default=0.0) if recompute != "none" else 0.0
        top = max(2 * own.mlp, own.expert_mlp * own.experts_per_token, own.shared_mlp) * b
        scattered = b + rows * max(4, b) if self.cut.sequence_parallel else 0.0
        column = own.hidden * (max(4, b) + b + scattered) - 3 * own.mlp * b if self.cut.tp > 1 else 0.0
        row = own.hidden * (max(4, b) + rows * (b + (max(4, b) if self.cut.sequence_parallel else 0)))
        if recompute != "none" and self.cut.tp > 1:
            top = max(top, row)
        hidden = rows * own.hidden * b * (3 if self.cut.pp > 1 else 1)
        chunks = self.inner.chunks() if self.plain_delta and own.linear_layers else 0.0
        return again + max(top, column) + hidden + chunks

    def layers(self, size: int) -> list[float]:
        """Of every layer of the model without recomputation."""
        own, b, rows = self.own, self.bytes_per_value, self.cut.rows
        keeps = self.cut.tp > 1 or not self.lora_columns + self.lora_rows  # linears.py keeps its input whatever trains
        norms = 2 * rows * (self._norm(own.hidden) + (own.hidden * b if keeps else 0))
        lora = (rows * self.lora_columns + self.lora_rows / self.cut.tp) * b
        fused = (2 * own.linear_key_heads + 2 * own.linear_value_heads) * own.linear_head_dim * b
        gathered = own.hidden * b if self.cut.sequence_parallel else 0.0
        mixers = [self._attention(size)] * own.attention_layers + [self.inner.recurrent() + fused] * own.linear_layers
        dense = (5 if keeps else 4) * own.mlp * b
        mlps = [dense] * (own.layers - own.moe_layers) + [self.inner.experts() + gathered] * own.moe_layers
        return [mixer + mlp + norms + lora for mixer, mlp in zip(mixers, mlps, strict=True)]

    def _norm(self, width: int, heads: int = 1) -> float:
        b, frozen = self.bytes_per_value, bool(self.lora_columns + self.lora_rows)
        wide = max(4, b) if self.shape.gated_attention else 4  # hybrid families multiply in fp32
        normed = wide if self.shape.gated_attention else b
        return width * (wide + (0 if frozen else normed)) + 4 * heads

    def _attention(self, size: int) -> float:
        own, b = self.own, self.bytes_per_value
        q, k = own.heads * own.head_dim, own.kv_heads * own.head_dim
        kept = 3.0 * (q + k) * b + 4 * own.heads
        if own.normed_queries:
            kept += self._norm(q, own.heads) + self._norm(k, own.kv_heads)
        if own.gated_attention:
            kept += 3 * q * b
        if size > 1:  # out before and after the exchange; k and v repeated for more ranks than heads
            kept += q * b + 2 * max(0, size - own.kv_heads) * own.head_dim * b
        return kept
