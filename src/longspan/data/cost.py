"""Cost model: seconds that each rank of a CP group spends on one sample, forward and backward, on its pipeline stage.

For a sample of L tokens on c ranks:  time = linear(c) * L + quadratic(c) * L^2  (windowed layers: linear beyond the
window).

    dense        2 flops a weight and token forward, twice that backward, once more where the layer is recomputed
    attention    2 L^2 H D forward (causal), 2.5 times that backward; never twice unless recompute is "full"; a document
                 of L tokens reaches attention_flops * L / (L + half), which makes its time a polynomial of degree 2
    linear       Gated DeltaNet, proportional to L; the state form loses a sixth at c = 2 and more beyond, the heads form moves more bytes
    head         6 flops a weight and trained token (logits once and two gradients: the loss is formed inside the head)
    vision       the tower on the visual tokens, shared out over the c ranks
    experts      the routed experts' exchange over `ep` ranks
    exchange     the mixer's collectives, each kind with what its packing and its sums cost beside the travel; the slow
                 links count once c * tp passes a node
    tensor       tp's collectives (`_tensor_token_s`), as far as the matmul beside them does not hide them
    offload      checkpoints on their way to the host and back, as far as FSDP's traffic would show as well

and once a micro-step `step_s`: launches and what FSDP's traffic does not hide (its upper case: `traffic_s`), or tp's
gather of the head's weight.
backend="megatron" (`sharded` False) has no FSDP traffic; dense, attention, linear and exchange are those of 1/tp of the
heads and columns, experts, tower and head are repeated on tensor-parallel ranks; a stage has 1 / (pp * vpp) of the layers,
the first one the tower, the last one the head (data/stages.py); engine/pipelines.py plays stages out. Sums over samples give a row's time,
which leaves out that a row of many short samples fills the GPU better than one of them alone. Only +, * and / of the
same floats on every rank: plans agree bit for bit. Constants: data/machine.py, checked against the whole-step figures
of H200.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from longspan.data.machine import Machine
from longspan.data.plan import IndexKind
from longspan.data.shape import ModelShape
from longspan.data.stages import WHOLE, Cut, own_weights
from longspan.errors import UserError

MixerName = Literal["ulysses", "ring", "gather", "hybrid"]
Recompute = Literal["none", "selective", "full"]
PARTS = ("dense", "attention", "linear", "head", "vision", "experts", "exchange", "tensor", "offload")
FORWARDS = {"none": 3.0, "selective": 4.0, "full": 4.0}  # a backward counts as two forwards
ATTENTION_BACKWARD = 2.5  # of its forward
# Beside the travel itself, in bytes of ulysses's all-to-all: a ring merges partial outputs in fp32 at each hop, MERGED times
# a query head's bytes; gather sums fp32 gradients of the whole row, which makes its keys GATHERED times as dear. From CP 2
# on H200s, 16/8/128, 64k tokens (results/mixers.json): beyond half of one GPU's time, ulysses 3.0 (one row) and 2.2 ms
# (mix), ring 4.5 and 3.6, gather 6.6 and 6.6, all of 403 MB.
MERGED, GATHERED = 1.5, 2.4


@dataclass(frozen=True, slots=True)
class CostModel:
    """Callable as cost(length, size) in seconds."""

    shape: ModelShape
    machine: Machine
    num_ranks: int = 1  # parameters are sharded over all of them
    mixer: MixerName = "ulysses"
    index: IndexKind = "contiguous"
    linear: Literal["state", "heads"] = "state"
    ulysses: int | None = None  # the ulysses part of hybrid
    recompute: Recompute = "selective"
    trained_share: float = 1.0  # tokens with mask 1, of all
    visual_share: float = 0.0  # visual tokens, of all
    image_tokens: int = 256  # visual tokens of one image: the tower attends within it
    ep: int = 1
    offload: tuple[str, ...] = ()
    bytes_per_value: int = 2
    scale: float = 1.0  # measured over predicted, from the run before
    sharded: bool = True  # parameters are FSDP's; False: backend="megatron", cut as `cut` says
    cut: Cut = WHOLE
    first: bool = True  # this stage has the embeddings and the tower
    last: bool = True  # this stage has the head

    def __post_init__(self) -> None:
        if self.recompute not in FORWARDS:
            raise UserError(f"recompute={self.recompute!r} is unknown. Use one of {tuple(FORWARDS)}.")
        if self.mixer not in ("ulysses", "ring", "gather", "hybrid"):
            raise UserError(f"mixer={self.mixer!r} has no cost. Use 'ulysses', 'ring', 'gather' or 'hybrid'.")
        for name, share in (("trained_share", self.trained_share), ("visual_share", self.visual_share)):
            if not 0 <= share <= 1:
                raise UserError(f"{name}={share} is not in 0..1.")

    def __call__(self, length: int, size: int) -> float:
        return float(self.times(np.asarray([length], dtype=np.float64), size)[0])

    def times(self, lengths: np.ndarray, size: int) -> np.ndarray:
        """Seconds of each sample on each of `size` ranks; lengths [n] f64."""
        parts = self.parts(lengths, size)
        total = np.zeros_like(lengths)
        for name in PARTS:
            total = total + parts[name]
        return total * self.scale

    def parts(self, lengths: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """`times` by cause, unscaled, for tables; lengths [n] f64."""
        shape, machine = self.shape, self.machine
        share = lengths / size  # tokens of a rank
        layers = 1.0 / self.cut.stages
        dense = 2.0 * self.cut.own(shape).active_weights * FORWARDS[self.recompute] / machine.matmul_flops
        head = 6.0 * shape.hidden * shape.vocab * self.trained_share / machine.head_flops if self.last else 0.0
        return {
            "dense": share * (dense * layers),
            "attention": self._attention(lengths, size) * layers,
            "linear": share * (self._linear_token_s(size) * layers),
            "head": share * head,
            "vision": share * (self._vision_token_s() if self.first else 0.0),
            "experts": share * (self._expert_token_s() * layers),
            "exchange": share * (self._exchange_bytes(size) / self._bytes_s(size) * layers),
            "tensor": share * (self._tensor_token_s() * layers),
            "offload": share * self._offload_token_s(),
        }

    def stages(self) -> tuple["CostModel", ...]:
        """The cost model of each virtual stage: number v is chunk v // pp of pipeline rank v % pp."""
        last = self.cut.stages - 1
        return tuple(replace(self, first=number == 0, last=number == last) for number in range(last + 1))

    @property
    def step_s(self) -> float:
        """Fixed time of a micro-step."""
        machine, shape = self.machine, self.shape
        if not self.sharded:
            return (machine.launch_s * shape.layers / self.cut.stages + self._gathered_head_s()) * self.scale
        # fp32 shards come from the host twice and their gradients go once; nothing hides that
        host = 12.0 * shape.weights / self.num_ranks / machine.host_bytes_s if "parameters" in self.offload else 0.0
        exposed = 1.0 - machine.gather_overlap
        return (machine.launch_s * shape.layers + self.traffic_s * exposed + host) * self.scale

    @property
    def traffic_s(self) -> float:
        """FSDP's traffic in a micro-step at most, hidden or not: weights gathered for forward and again for backward, fp32
        gradients scattered after it. Calls that have room gather once, and scatter once a call (engine/reductions.py); that
        is decided of a finished plan, so plans count with the upper case. It is one in bytes too: a rank receives only the others'
        part. On two H200s (results/step_cp.json, 64k row) 64 ms are said, and NCCL's kernels took 39, with one gather 33."""
        machine, shape = self.machine, self.shape
        if self.num_ranks == 1 or not self.sharded:
            return 0.0
        rate = machine.gather_bytes_s if self.num_ranks <= machine.node_ranks else machine.node_exchange_bytes_s
        return shape.weights * (2.0 * self.bytes_per_value + 4.0) / rate + 3.0 * shape.layers * machine.latency_s

    @property
    def update_s(self) -> float:
        """Traffic of an optimizer step of backend="megatron", outside forward_backward: fp32 gradients summed into slices over
        the data ranks, slices gathered, of the pipeline rank with most weights. FSDP's is in each micro-step."""
        machine, ep = self.machine, self.ep
        if self.sharded or self.num_ranks == 1:
            return 0.0
        spans = self.num_ranks * self.cut.tp
        rate = machine.gather_bytes_s if spans <= machine.node_ranks else machine.node_exchange_bytes_s
        found = []
        for rank in range(self.cut.pp):
            own, replicas = own_weights(self.shape, self.cut, rank, ep), self.num_ranks // ep
            moved = own.shared * (self.num_ranks - 1) / self.num_ranks + own.experts * (replicas - 1) / replicas
            found.append(8.0 * moved / rate)
        return max(found) * self.scale

    @property
    def hop_token_s(self) -> float:
        """Between two stages, seconds a token of a rank: hidden states one way. Stages may stand on other nodes."""
        machine = self.machine
        near = self.num_ranks * self.cut.tp * self.cut.pp <= machine.node_ranks
        rate = machine.exchange_bytes_s if near else machine.node_exchange_bytes_s
        return self.cut.rows * self.shape.hidden * self.bytes_per_value / rate * self.scale

    def _gathered_head_s(self) -> float:
        """The output layer's weight, gathered over tp once a micro-step."""
        tp = self.cut.tp
        matrix = self.shape.vocab * self.shape.hidden * self.bytes_per_value
        return matrix * (tp - 1) / tp / self._bytes_s(1) if self.last else 0.0

    def _tensor_token_s(self) -> float:
        """Of all layers. Bytes of one [T, E] over tp ranks: (tp - 1) / tp gathered or scattered, twice that all-reduced. Each
        pair of a column and a row linear (attention; dense MLP), A = 4 bytes a sum (8 in fp64), b a value:

                             plain    sequence parallel
            forward          2 A      b + A        and once more where the layer is run again
            row, backward    0        b
            column, backward 2 A      b + A        beside the weight's gradient, 2 flops a weight and token

        An expert block is repeated: nothing, or under sequence parallelism its rows gathered each way; with etp the experts'
        output is summed in each forward, the gradient of their input in the backward.
        """
        shape, tp, b = self.shape, self.cut.tp, self.bytes_per_value
        if tp == 1:
            return 0.0
        own, wide, rows = self.cut.own(shape), max(4, b), self.cut.sequence_parallel
        forward, row = (b + wide, b) if rows else (2 * wide, 0)
        again = self.recompute != "none"
        dense = shape.layers - shape.moe_layers
        travelled = (shape.layers + dense) * (forward * (2 if again else 1) + row)
        times = 3 if again else 2
        travelled += shape.moe_layers * times * ((b if rows else 0) + (2 * wide if self.cut.etp > 1 else 0))
        beside = (shape.layers + dense) * forward
        machine = self.machine
        rate = machine.gather_bytes_s if tp <= machine.node_ranks else machine.node_exchange_bytes_s
        unit = shape.hidden * (tp - 1) / tp / rate
        columns = (
            own.attention_layers * (own.heads * (2 if own.gated_attention else 1) + 2 * own.kv_heads) * own.head_dim
        )
        columns += own.linear_layers * (2 * own.linear_key_heads + 2 * own.linear_value_heads) * own.linear_head_dim
        columns += dense * 2 * own.mlp
        hidden = 2.0 * shape.hidden * columns / machine.matmul_flops
        return travelled * unit + max(0.0, beside * unit - hidden)

    def _attention(self, lengths: np.ndarray, size: int) -> np.ndarray:
        shape, machine = self.cut.own(self.shape), self.machine
        passes = ATTENTION_BACKWARD + (2.0 if self.recompute == "full" else 1.0)
        width = 2.0 * shape.heads * shape.head_dim * passes / machine.attention_flops
        half = machine.attention_half_length
        full = shape.attention_layers - shape.windowed_layers
        ring = size // self._ulysses_part(
            size
        )  # ranks that each hold other queries: in token order the last has most keys
        skew = (2.0 * ring - 1.0) / ring if self.index == "contiguous" else 1.0
        time = full * width / size * skew * lengths * (lengths + half)
        if shape.window is not None:
            reach = np.minimum(
                lengths, 2.0 * shape.window
            )  # a window w costs as much as a document of 2w, for each token
            time = time + shape.windowed_layers * width / size * lengths * (reach + half)
        return time

    def _linear_token_s(self, size: int) -> float:
        if not self.shape.linear_layers:
            return 0.0
        efficiency = 1.0
        if size > 1 and self.linear == "state":
            efficiency = min(1.0, 2.0 * self.machine.linear_state_share / size + 0.1)
        heads = self.cut.own(self.shape).linear_value_heads * self.shape.linear_head_dim / 128
        again = FORWARDS[self.recompute] / 3.0
        return self.shape.linear_layers * heads * self.machine.linear_token_s * again / efficiency

    def _vision_token_s(self) -> float:
        vision = self.shape.vision
        if vision is None or not self.visual_share:
            return 0.0
        patches = vision.merge
        attention = 4.0 * self.image_tokens * vision.merge * vision.hidden * vision.layers
        forwards = FORWARDS[self.recompute if self.sharded else "none"]  # megatron's tower is never run again
        flops = patches * (2.0 * self.shape.vision_weights + attention) * forwards
        return self.visual_share * flops / self.machine.vision_flops

    def _expert_token_s(self) -> float:
        if not self.shape.experts or self.ep == 1:
            return 0.0
        sent = self.shape.moe_layers * self.shape.experts_per_token * self.shape.hidden * self.bytes_per_value
        # there and back, forward, backward and recomputed forward
        times = 2.0 * FORWARDS[self.recompute] / 1.5
        return times * sent * (self.ep - 1) / self.ep / self._bytes_s(self.ep)

    def _offload_token_s(self) -> float:
        """Each layer's input, and under selective attention's output, to the host and back."""
        if "checkpoints" not in self.offload:
            return 0.0
        shape = self.shape
        kept = shape.layers * shape.hidden
        kept += shape.attention_layers * shape.heads * shape.head_dim if self.recompute == "selective" else 0
        exposed = 1.0 - self.machine.gather_overlap
        return 2.0 * kept * self.bytes_per_value * exposed / self.machine.host_bytes_s

    def _exchange_bytes(self, size: int) -> float:
        """Bytes that a rank sends for each of its own tokens, forward and backward, all softmax layers; MERGED and
        GATHERED as if they were bytes."""
        if size == 1:
            return 0.0
        shape = self.cut.own(self.shape)
        token = shape.head_dim * self.bytes_per_value * shape.attention_layers
        ulysses = self._ulysses_part(size)
        rest = size // ulysses
        heads = 2.0 * shape.heads + 2.0 * max(shape.kv_heads, ulysses)  # q and out, k and v (replicated when few)
        exchanged = heads * (ulysses - 1) / ulysses
        passed = 2.0 * max(shape.kv_heads / ulysses, 1.0) * ulysses * (rest - 1)
        merged = MERGED * shape.heads * (rest - 1) if self.mixer in ("ring", "hybrid") else 0.0
        dearer = GATHERED if self.mixer == "gather" else 1.0
        # k and v go round again in the backward, with their gradients
        return token * (2.0 * exchanged + 3.0 * passed * dearer + merged)

    def _ulysses_part(self, size: int) -> int:
        """Ranks of a group that swap tokens for heads."""
        return {"ulysses": size, "hybrid": math.gcd(self.ulysses or size, size), "ring": 1, "gather": 1}[self.mixer]

    def _bytes_s(self, size: int) -> float:
        """Of collectives over `size` data ranks: tensor-parallel ranks stand between them."""
        machine = self.machine
        return machine.exchange_bytes_s if size * self.cut.tp <= machine.node_ranks else machine.node_exchange_bytes_s


@dataclass(frozen=True, slots=True)
class RowCost:
    """A row's predicted seconds by part."""

    parts: dict[str, float]
    total_s: float


def row_cost(cost: CostModel, lengths: Sequence[int], size: int) -> RowCost:
    """What a row of these samples costs, and why."""
    parts = cost.parts(np.asarray(lengths, dtype=np.float64), size)
    sums = {name: float(values.sum()) * cost.scale for name, values in parts.items()}
    return RowCost(sums, sum(sums.values()))
