"""What autograd keeps of a micro-step on one rank of backend="megatron", bytes a token of the row's share of that rank.

Read off engine/megatron and megatron-core's local layers, which run eagerly. h: hidden; q, k: a tensor-parallel rank's
query and KV heads times head_dim; m: its MLP columns; b: bytes of a value; rows: 1/tp under sequence parallelism, else 1.

    norm        its input in fp32, 1 scale; the normalised values where its weight is trained (layers.Norm, ZeroNorm). In fp32
                that input is no copy: q and k are views of the fused q, k, v (q a copy where a rank has several KV heads)
    attention   q and k after RoPE, out (b each), LSE; v is a view of the fused q, k, v, which stays whole: 3 q + 3 k. Under cp
                what was exchanged in their place, v too, and out before and after the exchange
    gated       its query projection is twice as wide; the gate's sigmoid and the product: 3 q more
    MLP         gate and up (one tensor), gate's activation, up + 0.0 (megatron-core's offset), the product: 5 m. Row linears
                keep their input
    experts     repeated on every tensor-parallel rank, on all tokens; under sequence parallelism their gathered input

With recomputation a layer keeps its input (rows h b) and, under "selective", attention's out and LSE: what is made again is
the rest. Hidden states between stages: what a stage sends stays with its micro-step (pipeline.Flight). Of each micro-step in
flight there are also RoPE tables and the stream's fields. Held against live bytes in tests/dist/test_stage_memory.py, which
derives what is left out.
"""

from dataclasses import dataclass

from longspan.data.activations import Activations, attention_kept
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
    ep: int = 1

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
        own, stages = self.own, self.cut.stages
        if recompute == "none":
            return sum(self.layers(size)) / stages
        return (own.layers * self._input + own.attention_layers * self._spared(recompute)) / stages

    def kept_layer(self, recompute: str, size: int) -> float:
        """By one layer, the last of its chunk whose backward runs."""
        if recompute == "none":
            return max(self.layers(size), default=0.0)
        return self._input + self._spared(recompute)

    def between(self, *, sends: bool) -> float:
        """Of one micro-step in flight, beside its layers: fields, RoPE's cosines and sines, what it sends on."""
        return FIELDS + 2 * self.own.head_dim * self.bytes_per_value + (self._input if sends else 0.0)

    def backward(self, recompute: str, size: int, *, neighbours: int = 0) -> float:
        """Of the layer whose backward runs: what is made again, gradients, and what crosses ranks.

        At its top: the hidden gradient, and 2 m, since the product's gradient becomes those of its two factors (3 m) while
        its own m is let go. At the MLP's column linear, when of its 5 m there are the 2 m of its gradient: the input's
        gradient in fp32 and in b, under sequence parallelism the rows gathered and what is scattered as well. At the end of
        what is made again: the MLP's row linear, whose sum is fp32 (a recomputation stops after it, not before). At
        attention, when all of the MLP's is gone: q, k, v and their gradients on both sides of an exchange. Plain DeltaNet:
        its chunks. neighbours: hidden states and gradients on their way to this rank or from it.
        """
        own, b, rows = self.own, self.bytes_per_value, self.cut.rows
        wide, dense = max(4, b), own.layers > own.moe_layers
        scattered = b + rows * wide if self.cut.sequence_parallel else 0.0
        tops = [self._experts_alive() if own.moe_layers else 0.0]
        if dense:
            tops.append(2.0 * own.mlp * b)
            tops.append(own.hidden * (wide + b + scattered) - 3 * own.mlp * b if self.cut.tp > 1 else 0.0)
        if dense and recompute != "none" and self.cut.tp > 1:
            tops.append(own.hidden * (wide + rows * (b + (wide if self.cut.sequence_parallel else 0))))
        if size > 1:
            exchanged = 2.0 * (own.heads + 2 * max(own.kv_heads, size)) * own.head_dim * b
            tops.append(exchanged - (self._mlp() if dense else self._experts()))
        chunks = self.inner.chunks() if self.plain_delta and own.linear_layers else 0.0
        return self._again(recompute, size) + max(tops) + (1 + neighbours) * self._input + chunks

    @property
    def _input(self) -> float:
        """Hidden states on this rank."""
        return self.cut.rows * self.own.hidden * self.bytes_per_value

    def _spared(self, recompute: str) -> float:
        """What selective recomputation keeps of attention, so as not to run it twice: out and LSE."""
        own = self.own
        return own.heads * own.head_dim * self.bytes_per_value + 4 * own.heads if recompute == "selective" else 0.0

    def _again(self, recompute: str, size: int) -> float:
        """Of the largest layer that is run again: all that it keeps but what is there. In fp32 its input is one of these."""
        if recompute == "none":
            return 0.0
        own, spared = self.own, self._spared(recompute)
        there = [spared] * own.attention_layers + [0.0] * own.linear_layers
        made = [layer - part for layer, part in zip(self.layers(size), there, strict=True)]
        return max(made, default=0.0) - (self._input if self.bytes_per_value == 4 else 0.0)

    def _experts_alive(self) -> float:
        """Beside what experts keep: copies of the chosen tokens' rows on both sides of the experts, and of an exchange."""
        own = self.own
        copies = 4 if self.ep > 1 else 2
        return (
            copies * own.experts_per_token * own.hidden * self.bytes_per_value + own.shared_mlp * self.bytes_per_value
        )

    def layers(self, size: int) -> list[float]:
        """Of every layer of the model without recomputation."""
        own, b, rows = self.own, self.bytes_per_value, self.cut.rows
        norms = 2 * rows * (self._norm(own.hidden) + (own.hidden * b if self._keeps else 0))
        lora = (rows * self.lora_columns + self.lora_rows / self.cut.tp) * b
        fused = (2 * own.linear_key_heads + 2 * own.linear_value_heads) * own.linear_head_dim * b
        mixers = [self._attention(size)] * own.attention_layers + [self.inner.recurrent() + fused] * own.linear_layers
        mlps = [self._mlp()] * (own.layers - own.moe_layers) + [self._experts()] * own.moe_layers
        return [mixer + mlp + norms + lora for mixer, mlp in zip(mixers, mlps, strict=True)]

    @property
    def _keeps(self) -> bool:
        """linears.py keeps its input whatever trains."""
        return self.cut.tp > 1 or not self.lora_columns + self.lora_rows

    def _mlp(self) -> float:
        return (5 if self._keeps else 4) * self.own.mlp * self.bytes_per_value

    def _experts(self) -> float:
        gathered = self.own.hidden * self.bytes_per_value if self.cut.sequence_parallel else 0.0
        return self.inner.experts() + gathered

    def _norm(self, width: int, heads: int = 1, *, copied: bool = True) -> float:
        """copied: whether the norm's input is a tensor of its own, counted here, and not a view of what is counted."""
        b, frozen = self.bytes_per_value, bool(self.lora_columns + self.lora_rows)
        wide = max(4, b) if self.shape.gated_attention else 4  # hybrid families multiply in fp32
        normed = wide if self.shape.gated_attention else b
        return width * ((wide if copied or b != wide else 0) + (0 if frozen else normed)) + 4 * heads

    def _attention(self, size: int) -> float:
        """q, k, v fused, q and k after RoPE, out; a gate's three; v once more after an exchange."""
        own, gated = self.own, self.own.gated_attention
        exchanged_v = 1 if size > 1 else 0
        kept = attention_kept(own, self.bytes_per_value, size, queries=6 if gated else 3, keys=3 + exchanged_v)
        if own.normed_queries:
            kept += self._norm(own.heads * own.head_dim, own.heads, copied=gated or own.kv_heads > 1)
            kept += self._norm(own.kv_heads * own.head_dim, own.kv_heads, copied=gated)
        return kept
