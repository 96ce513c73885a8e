"""Memory model of backend="megatron": peak bytes of one rank under tp, pp, vpp and ep, by cause; of all pipeline ranks the
one that holds most.

Always there, of a rank's own weights (data/stages.py), M = 4 (8 in fp64) bytes each:

    parameters  what computes (b) and its master (M) where b is less; nothing is cut over data ranks
    gradients   one accumulator (M) a trained weight: parameter.grad, under bf16 the fp32 sums of backend.py
    optimizer   moments (M each) of one slice: 1 / (dp * cp), experts 1 / (dp * cp / ep) (zero.py)

On top, the largest of five moments of each pipeline rank, which holds n = flights[rank] (micro-step, chunk) pairs at most:

    head   last rank: n pairs, the output layer's weight gathered over tp (V E b), the final norm and hidden states of all
           tokens, one chunk of fp32 logits, the output layer's gradient in fp32 (the head forms it in its forward)
    layer  n pairs, what the layer whose backward runs makes again, its gradients, a rank's rows of the head's where they
           wait for the embeddings' (tied, one stage) or for the fp32 sums
    end    n - 1 pairs and one layer's, the first of a chunk, in its backward; gradients (b) of the rest of the chunk under
           bf16, where they wait for the fp32 sums until the chunk is done; in master precision they are added as they appear
    sums   bf16: n - 1 pairs, those gradients with the embeddings', and the largest of them in fp32
    step   no activation: gradients summed into slices, of which the norm squares the largest in fp64 (16 bytes a number);
           later, the accumulators gone, slices, their clipped copies and AdamW's square roots (3 M)

Beside these, outside the allocator, the buffers that attention travels through (data/travel.py). In bytes: `data_ranks` =
dp * cp. Pure CPU.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from longspan.data.cost import Recompute
from longspan.data.memory import HEAD_CHUNK_BYTES, token_budget
from longspan.data.shape import ModelShape
from longspan.data.stage_activations import StageActivations
from longspan.data.stages import Cut, OwnWeights, own_weights
from longspan.data.travel import COLLECTIVES, Travel

__all__ = ["EVERYTHING", "StageMemory", "Trained"]


@dataclass(frozen=True, slots=True)
class Trained:
    """Shares of the weights that get a gradient."""

    layers: float = 1.0
    embeddings: bool = True  # and the output layer
    vision: float = 1.0

    def of(self, own: OwnWeights) -> OwnWeights:
        return OwnWeights(
            own.layers * self.layers,
            own.experts * self.layers,
            own.embeddings * self.embeddings,
            own.vision * self.vision,
        )


EVERYTHING = Trained()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank. `parts` by cause on the fullest pipeline rank; `peak` their sum."""

    shape: ModelShape
    cut: Cut
    data_ranks: int
    flights: tuple[int, ...]  # of each pipeline rank (engine/pipelines.py plays the schedule for it)
    recompute: Recompute = "selective"
    bytes_per_value: int = 2
    trained: Trained = EVERYTHING
    moments_per_weight: int = 2  # 2 AdamW, 0 plain SGD
    visual_share: float = 0.0
    ep: int = 1
    lora_columns: int = 0
    lora_rows: int = 0
    plain_delta: bool = False
    travel: Travel = COLLECTIVES
    head_chunk_bytes: int = HEAD_CHUNK_BYTES
    slack: float = 0.01

    @cached_property
    def activations(self) -> StageActivations:
        """What autograd keeps a token."""
        return StageActivations(
            self.shape, self.cut, self.bytes_per_value, self.lora_columns, self.lora_rows, self.plain_delta, self.ep
        )

    def parts(self, tokens: int, size: int = 1) -> dict[str, float]:
        """By cause at the peak of the fullest pipeline rank."""
        return max(self.by_rank(tokens, size), key=lambda parts: sum(parts.values()))

    def peak(self, tokens: int, size: int = 1) -> float:
        """With `tokens` tokens of a row of `size` data ranks on each tensor-parallel rank (pads included)."""
        return sum(self.parts(tokens, size).values())

    def by_rank(self, tokens: int, size: int = 1) -> list[dict[str, float]]:
        """`parts` of every pipeline rank."""
        found = []
        for rank in range(self.cut.pp):
            moments = self.moments(tokens, size, rank=rank).values()
            parts = self.static(rank) | max(moments, key=lambda parts: sum(parts.values()))
            found.append(
                parts | {"slack": self.slack * sum(parts.values()), "travel buffers": self.buffers(tokens, size)}
            )
        return found

    def buffers(self, tokens: int, size: int = 1) -> float:
        """As MemoryModel.buffers: of this rank's heads, the same on every stage."""
        return self.travel.buffers(self.cut.own(self.shape), self.bytes_per_value, tokens, size)

    def budget(self, memory_gib: float, *, size: int = 1) -> int:
        """As MemoryModel.budget."""
        cut = self.cut
        where = f"tp={cut.tp}, pp={cut.pp}, {self.data_ranks} data ranks"
        return token_budget(self, memory_gib, size=size, where=where, ways=lambda room: "more tp, pp, ep or dp")

    def static(self, rank: int) -> dict[str, float]:
        """What a pipeline rank always holds."""
        wide, b, trained = self._wide, self.bytes_per_value, self._trained(rank)
        slices = trained.shared / self.data_ranks + trained.experts * self.ep / self.data_ranks
        there = self._own(rank).total + (trained.total if self._adapted else 0.0)
        return {
            "parameters": there * (wide + (b if b < wide else 0)),
            "gradients": trained.total * wide,
            "optimizer": self.moments_per_weight * wide * slices,
        }

    def moments(self, tokens: int, size: int = 1, *, rank: int) -> dict[str, dict[str, float]]:
        """Beside what is always there: bytes by cause at each moment that may be the peak."""
        flights, b, cut = self.flights[rank], self.bytes_per_value, self.cut
        first, last, waits = rank == 0, rank == cut.pp - 1, b < self._wide
        own, activations = self._trained(rank), self.activations
        between = activations.between(sends=cut.pp > 1 and (cut.vpp > 1 or not last))
        one = tokens * (activations.kept(self.recompute, size) + between)
        vision = flights * self._vision(tokens, tower=first)
        neighbours = (not first) + (not last) + (cut.vpp > 1)  # interleaved: a receive is posted a move ahead
        backward = tokens * activations.backward(self.recompute, size, neighbours=neighbours)
        vocabulary = b * float(-(-self.shape.vocab // cut.tp) * self.shape.hidden) if self.trained.embeddings else 0.0
        head = vocabulary if last and (waits or (self.shape.tied and cut.pp == 1)) else 0.0
        layer = b * (own.layers + own.experts) / max(1.0, self.shape.layers / cut.pp) if waits else 0.0
        top = min(layer, b * self._of_layer * self.trained.layers / 2)  # what its first linear in backward has got
        chunk = b * own.total / cut.vpp if waits else 0.0
        late = vocabulary if first else 0.0  # after the first layer's backward
        kept = {"activations": flights * one, "vision": vision}
        ending = (flights - 1) * one + tokens * (between + activations.kept_layer(self.recompute, size))
        found = {
            "layer": kept | {"layer": backward, "layer gradients": top + head},
            "end": {
                "activations": ending,
                "vision": vision,
                "layer": backward,
                "layer gradients": max(0.0, chunk - late - layer + top) if waits else head,
            },
            "step": self._step(rank),
        }
        if waits:
            sums = chunk + self._largest(rank) * self._wide
            found["sums"] = {"activations": (flights - 1) * one, "layer gradients": sums}
        if last:
            found["head"] = kept | {"head": self._head(tokens)}
        return found

    @property
    def _wide(self) -> int:
        return max(4, self.bytes_per_value)

    @property
    def _adapted(self) -> bool:
        """LoRA: trained.layers are factors, beside the weights and not of them."""
        return self.lora_columns + self.lora_rows > 0

    def _trained(self, rank: int) -> OwnWeights:
        """A bound for LoRA: of a pair of factors tp cuts one, and here none."""
        cut = replace(self.cut, tp=1, sequence_parallel=False, etp=1) if self._adapted else self.cut
        return self.trained.of(own_weights(self.shape, cut, rank, self.ep))

    def _own(self, rank: int) -> OwnWeights:
        return own_weights(self.shape, self.cut, rank, self.ep)

    def _largest(self, rank: int) -> float:
        """Weights of a rank's largest trained matrix: rows of the vocabulary, all experts' gate and up, or an MLP's."""
        ends = rank in (0, self.cut.pp - 1) and self.trained.embeddings
        vocabulary = -(-self.shape.vocab // self.cut.tp) * self.shape.hidden if ends else 0
        return max(float(vocabulary), self._of_layer * self.trained.layers)

    @property
    def _of_layer(self) -> float:
        """Weights of a layer's largest matrix, twice those of the next: gate and up of an MLP, or of all of a rank's experts."""
        shape, own = self.shape, self.cut.own(self.shape)
        experts = shape.experts // self.ep * 2 * own.expert_mlp * shape.hidden
        return float(experts or 2 * own.mlp * shape.hidden)

    def _step(self, rank: int) -> dict[str, float]:
        trained, wide = self._trained(rank), self._wide
        slices = trained.shared / self.data_ranks + trained.experts * self.ep / self.data_ranks
        largest = self._largest(rank)
        summed = slices * wide + max(largest * 16 / self.data_ranks, largest * wide * (1 + 1 / self.data_ranks))
        return {"step": max(summed, 3 * slices * wide - trained.total * wide)}

    def _head(self, tokens: int) -> float:
        """Hidden states whole and their gradient; the final norm on this rank's rows; logits; weight and its gradient."""
        shape, b, wide, cut = self.shape, self.bytes_per_value, self._wide, self.cut
        normed = 0 if self._adapted else b  # read by the norm's weight where it trains
        rows = cut.rows * shape.hidden * (4 + normed + (b if cut.sequence_parallel else 0))
        per_token = 2 * shape.hidden * b + rows + 6 * wide
        matrix = shape.vocab * shape.hidden
        chunk = min(self.head_chunk_bytes, tokens * shape.vocab * wide)
        gathered = matrix * b if cut.tp > 1 else 0.0
        gradient = matrix * wide if self.trained.embeddings else 0.0
        return tokens * per_token + gathered + gradient + max(chunk, gradient * b / wide)

    def _vision(self, tokens: int, *, tower: bool) -> float:
        """Of one micro-step: pixels on every stage; on the first the tower, which is never run again, and its features, which
        are placed whole."""
        vision, b = self.shape.vision, self.bytes_per_value
        if vision is None or not self.visual_share:
            return 0.0
        patches = tokens * self.visual_share * vision.merge
        pixels = patches * vision.patch_values * 4
        if not tower:
            return pixels
        entering = (b if b != 4 else 0) * vision.patch_values + vision.hidden * b  # pixels in b; with positions added
        features = (1 + vision.deepstack) * self.shape.hidden * b
        deepstack = vision.deepstack * self.cut.rows * self.shape.hidden * b
        of_patch = self.activations.inner.vision_patch("none") + entering
        return pixels + patches * of_patch + tokens * (self.visual_share * features + deepstack)
