"""What autograd keeps of a micro-step, bytes a token of one rank, by layer and recomputation policy.

Read off transformers' modules as autograd saves them in eager mode (norms in fp32):

    none       every tensor that a backward reads
    selective  each layer's input, and attention's output and LSE: the layer is run again, its attention is not
    full       each layer's input

A compiled layer is four pieces around attention (norm; q, k, v; output projection; residual, norm and MLP), since calls that
are not compiled break its graph. Without a checkpoint it keeps what engine/fsdp/compiled.py tells the partitioner:

    selective  each piece's inputs: the layer's input, its norm, the attention block's output; and attention's own tensors
    none       the outputs of matrix products too

and run again under full it keeps, until its backward is done, those and gate and up. Eager numbers are checked against
saved-tensor hooks (tests/unit/test_data_memory.py), compiled ones against the peaks of an H200 (docs/planning.md).
b: bytes of a value in compute precision.
"""

from dataclasses import dataclass

from longspan.data.shape import ModelShape
from longspan.data.travel import COLLECTIVES, Travel

CHUNK = 64  # tokens of a chunk of plain DeltaNet (mixers/deltanet_chunked.py)


def attention_kept(
    shape: ModelShape, bytes_per_value: int, size: int, *, queries: int, keys: int, one_output: bool = False
) -> float:
    """Bytes a token of one softmax attention, its norms left out. queries, keys: how many tensors of the width of all query
    heads (out is one) and of all KV heads are kept. Beside them the LSE and, in a row of several ranks, out before the
    exchange unless it is kept once; k and v repeated for more ranks than heads."""
    heads = queries * shape.heads + keys * shape.kv_heads
    if size > 1:
        heads += (0 if one_output else shape.heads) + 2 * max(0, size - shape.kv_heads)
    return float(heads * shape.head_dim * bytes_per_value + 4 * shape.heads)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes a token. lora_width: inputs and ranks of a layer's adapted linear layers; every other weight is frozen then."""

    shape: ModelShape
    bytes_per_value: int
    compile: bool = False
    lora_width: int = 0
    plain_delta: bool = False
    tiled: bool = False  # MLPs run tile by tile and keep nothing (engine/fsdp/tiled_mlp.py)
    travel: Travel = COLLECTIVES

    def kept(self, recompute: str, size: int, *, offload: bool = False) -> float:
        """By the whole decoder, from forward to backward."""
        shape, b = self.shape, self.bytes_per_value
        if self.compile and recompute != "full":
            return sum(self.compiled_layers(recompute, size, one_output=self.travel.one_output(shape, recompute)))
        if recompute == "none":
            return sum(self.layers(size))
        inputs = 0.0 if offload else shape.layers * shape.hidden * b
        if recompute == "full":
            return inputs
        out = 0.0 if offload else shape.heads * shape.head_dim * b
        return inputs + shape.attention_layers * (out + 4 * shape.heads)

    def backward(self, recompute: str, size: int) -> float:
        """Of the layer whose backward runs: what is made again, and gradients."""
        shape, b = self.shape, self.bytes_per_value
        chunks = self.chunks() if self.plain_delta and shape.linear_layers else 0.0
        ahead = self._ahead(recompute, size)
        if self.compile and not shape.experts:
            mlp = 0 if self.tiled else shape.mlp * b
            again = max(self.compiled_layers("selective", size)) if recompute == "full" else 0.0
            # gate and up are there or made again; product and its gradient, then gate's and up's in their place
            wide = {"full": 4, "selective": 6, "none": 2}[recompute] * mlp + 2 * shape.hidden * b
            freed = 2 * mlp if recompute == "none" else 0  # gate and up, by the time that attention's backward runs
            return again + max(wide, self._attention_gradients() - freed) + chunks + ahead
        again = max(self.layers(size), default=0.0) if recompute != "none" else 0.0
        return again + self._gradients() + chunks + ahead

    def _attention_gradients(self) -> float:
        """Of out, q, k and v, and what flash kernels add up of the last three in fp32. MLPs need more unless they run in tiles."""
        shape, b = self.shape, self.bytes_per_value
        widths = shape.heads + 2 * shape.kv_heads
        return float(shape.head_dim * ((shape.heads + widths) * b + widths * max(4, b)))

    def chunks(self) -> float:
        """Plain DeltaNet's backward runs its rule again in fp32: matrices between the tokens of a chunk, and vectors."""
        shape = self.shape
        return 4.0 * shape.linear_value_heads * (7 * CHUNK + 12 * shape.linear_head_dim)

    def layers(self, size: int = 1) -> list[float]:
        """What autograd keeps of each eager layer."""
        shape, b = self.shape, self.bytes_per_value
        softmax, linear = self._attention(size), self.recurrent()
        norms = 2 * self._norm(shape.hidden)
        norms += 0 if self.lora_width else 2 * shape.hidden * b  # their output, which a trained matrix reads
        lora = self.lora_width * b
        mixers = [softmax] * shape.attention_layers + [linear] * shape.linear_layers
        mlps = [self._mlp()] * (shape.layers - shape.moe_layers) + [self.experts()] * shape.moe_layers
        return [mixer + mlp + norms + lora for mixer, mlp in zip(mixers, mlps, strict=True)]

    def compiled_layers(self, recompute: str, size: int, *, one_output: bool = False) -> list[float]:
        """What each compiled layer keeps. Recurrent mixers and experts run as they are."""
        shape, b, products = self.shape, self.bytes_per_value, recompute == "none"
        count = 3 if products and shape.normed_queries else 2  # q, k, v, out; q and k before their norms
        attention = attention_kept(shape, b, size, queries=count, keys=count, one_output=one_output)
        mlp = 2.0 * shape.mlp * b if products else 0.0
        mixers = [attention] * shape.attention_layers + [self.recurrent()] * shape.linear_layers
        mlps = [mlp] * (shape.layers - shape.moe_layers) + [self.experts()] * shape.moe_layers
        pieces = 3 * shape.hidden * b + self.lora_width * b
        return [mixer + mlp + pieces for mixer, mlp in zip(mixers, mlps, strict=True)]

    def vision_patch(self, recompute: str) -> float:
        """Kept of the tower, bytes a patch: blocks and mergers. (A block that is run again is, after the decoder's backward.)"""
        vision, b = self.shape.vision, self.bytes_per_value
        if vision is None:
            return 0.0
        # fused qkv, q and k rotated, out; norms' inputs and outputs with their statistics; both sides of the activation
        block = (10 * vision.hidden + (4 if vision.gated else 2) * vision.mlp) * b + 4 * vision.heads + 16
        mergers = (3 * (1 + vision.deepstack) + 1) * vision.hidden * b
        if recompute != "none":  # the blocks' inputs, and attention's output and LSE
            block = vision.hidden * b + (vision.hidden * b + 4 * vision.heads if recompute == "selective" else 0)
        return vision.layers * block + mergers

    def _ahead(self, recompute: str, size: int) -> float:
        """The output of the attention below, on its way where layers keep one and do not run again: a recomputed layer's own
        is among what it makes again."""
        shape, runs_once = self.shape, self.compile and size > 1
        there = runs_once and self.travel.one_output(shape, recompute) and shape.attention_layers > 1
        return float(shape.heads * shape.head_dim * self.bytes_per_value) if there else 0.0

    def _norm(self, width: int, heads: int = 1) -> float:
        """The input in fp32, one scale a head, and the normalised values where the norm's weight is trained."""
        return width * (4 + (0 if self.lora_width else self.bytes_per_value)) + 4 * heads

    def _attention(self, size: int) -> float:
        """q, k, v, out, LSE; a gate's sigmoid and product."""
        shape = self.shape
        kept = attention_kept(shape, self.bytes_per_value, size, queries=4 if shape.gated_attention else 2, keys=2)
        if shape.normed_queries:
            for heads in (shape.heads, shape.kv_heads):
                kept += self._norm(heads * shape.head_dim, heads)
        return kept

    def recurrent(self) -> float:
        """Of one Gated DeltaNet mixer. While v was a view on fla's kernels: 70.8 GiB of a step said, 71.5 measured (docs/log.md)."""
        shape, b = self.shape, self.bytes_per_value
        values = shape.linear_value_heads * shape.linear_head_dim
        convolved = 2 * shape.linear_key_heads * shape.linear_head_dim + values
        gates = 6 * 4 * shape.linear_value_heads
        if self.plain_delta:
            # the convolution's input, output and terms in fp32, q and k normed, the kernel's v, z, out, gated norm in fp32
            return convolved * (4 * b + 5 * 4) + values * (4 * b + 8) + gates
        # the convolution's input; q and k normed, and v; z, out; the inverse of each chunk
        kept = (2 * convolved + 2 * values) * b + CHUNK * shape.linear_value_heads * b + gates
        return kept if self.compile else kept + values * (2 * b + 8)  # gated norm in fp32

    def _mlp(self) -> float:
        """Gate, its activation, up, and their product, which a trained down_proj reads."""
        if self.tiled:
            return 0.0
        return (3 if self.lora_width else 4) * self.shape.mlp * self.bytes_per_value

    def experts(self) -> float:
        """Router, its sort, and of each chosen expert: input, gate and up, activation, product, output."""
        shape, b = self.shape, self.bytes_per_value
        router = 4 * shape.experts + 4
        chosen = 2 * shape.hidden * b + 4 * shape.expert_mlp * b + 5 * 8 + 4 + 1 + b
        return router + shape.experts_per_token * chosen + 4 * shape.shared_mlp * b

    def _gradients(self) -> float:
        """Gradients alive at the top of a layer's backward, where all it kept is still there: hidden, once more in
        fp32, and one of the MLP's width (its matmul's input is freed as the next appears)."""
        shape, b = self.shape, self.bytes_per_value
        wide = max(0 if self.tiled else shape.mlp, shape.expert_mlp * shape.experts_per_token, shape.shared_mlp)
        return wide * b + shape.hidden * (b + 4)
