"""Cut: over how many ranks a model's matrices and layers are cut, and what one pipeline rank then holds. Pure numbers.

What backend="megatron" cuts over tp: projections and heads of attention, recurrent layers' heads, dense MLPs, the
vocabulary's rows; the columns of experts where etp = tp. What every tensor-parallel rank repeats: norms, routers, experts
without etp, the vision tower, and the head's work (its weight is gathered for a micro-step). Under sequence parallelism each
has 1/tp of the rows of norms and of the residual stream. Layers are cut over pp * vpp virtual stages in equal numbers; a
model's kinds of layer are taken as evenly spread over them. Embeddings and tower are on the first stage, the output layer on
the last (a tied one twice).
"""

from dataclasses import dataclass, replace

from longspan.data.shape import ModelShape

__all__ = ["WHOLE", "Cut", "OwnWeights", "own_weights"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Sizes as in Layout."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int = 1
    etp: int = 1  # 1, or tp

    @property
    def stages(self) -> int:
        """Virtual stages: number v is chunk v // pp of pipeline rank v % pp."""
        return self.pp * self.vpp

    @property
    def rows(self) -> float:
        """Share of a row's tokens that a rank has in norms and in the residual stream."""
        return 1.0 / self.tp if self.sequence_parallel else 1.0

    def own(self, shape: ModelShape) -> ModelShape:
        """The heads and columns of one tensor-parallel rank, all layers."""
        if self.tp == 1:
            return shape
        return replace(
            shape,
            heads=shape.heads // self.tp,
            kv_heads=shape.kv_heads // self.tp,
            mlp=shape.mlp // self.tp,
            linear_key_heads=shape.linear_key_heads // self.tp,
            linear_value_heads=shape.linear_value_heads // self.tp,
            expert_mlp=shape.expert_mlp // self.etp,
        )


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Numbers of weights of one pipeline rank, by what repeats them: experts over data ranks / ep, the others over all."""

    layers: float  # attention, recurrent layers, MLPs, routers
    experts: float  # routed experts
    embeddings: float  # rows of the vocabulary: embeddings and output layer
    vision: float

    @property
    def shared(self) -> float:
        """All but the experts."""
        return self.layers + self.embeddings + self.vision

    @property
    def total(self) -> float:
        return self.shared + self.experts


def own_weights(shape: ModelShape, cut: Cut, rank: int, ep: int = 1) -> OwnWeights:
    """Of pipeline rank `rank`. Norms and biases are left out (below 0.1 %), as in ModelShape.weights.

    layers       a pipeline rank has vpp of pp * vpp equal parts: 1/pp
    embeddings   ceil(V / tp) rows of E each; the output layer is a copy of its own where it is untied or pp > 1
    """
    own = cut.own(shape)
    mixers = own.attention_layers * own.attention_weights + own.linear_layers * own.linear_weights
    routed = shape.moe_layers * shape.experts * 3 * own.expert_mlp * shape.hidden
    vocabulary = -(-shape.vocab // cut.tp) * shape.hidden
    first, last = rank == 0, rank == cut.pp - 1
    copies = first + (last and (not shape.tied or cut.pp > 1))
    return OwnWeights(
        layers=(mixers + own.mlp_weights(0)) / cut.pp,
        experts=routed / ep / cut.pp,
        embeddings=float(copies * vocabulary),
        vision=float(shape.vision_weights) if first else 0.0,
    )
