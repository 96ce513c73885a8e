"""The Gated DeltaNet layer of Qwen3.5 and Qwen3-Next, exact under packing and context parallelism.

`replace_deltanets` puts one of these in place of each of transformers' GatedDeltaNet instances while an adapter is
built: same children and parameters under the same names, same maths (projections, convolution, rule, gated norm).
What changes: boundaries come from `longspan=Context`, tokens meet across ranks (mixers/linear.py), and in fp64 all
of it but the norm computes in fp64 (transformers computes the rule in fp32 and ignores boundaries without fla). No
cache: generation uses a plain model. Qwen3.5 projects q, k, v by `in_proj_qkv`, then z, b, a; Qwen3-Next
interleaves [q, k, v, z] and [b, a] by key head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longspan.errors import UserError
from longspan.mixers.linear import (
    DeltaShape,
    DeltaWeights,
    LinearPrepared,
    gated_delta,
    heads_refusal,
    prepare_linear,
)
from longspan.models.adapter import Context
from longspan.models.norms import GatedRMSNorm, replace_zero_centred_norms

__all__ = ["GatedDeltaNet", "prepare_recurrent", "recurrent_refusal", "replace_deltanets"]

Projected = tuple[Tensor, Tensor, Tensor, Tensor]  # mixed [T, C], z [T, H * D_v], b [T, H], a [T, H]


class GatedDeltaNet(nn.Module):
    """hidden [1, T_local, E] -> [1, T_local, E]. Collective on the row's group."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        if source.activation != "silu":
            raise UserError(f"hidden_act={source.activation!r} is not supported in a GatedDeltaNet, which has silu")
        self.dt_bias, self.A_log = source.dt_bias, source.A_log
        for name, child in source.named_children():
            self.add_module(name, GatedRMSNorm(child) if name == "norm" else child)
        self.layer_idx = source.layer_idx
        self.shape = DeltaShape(source.num_k_heads, source.num_v_heads, source.head_k_dim, source.head_v_dim)
        self.project = PROJECTIONS[type(source).__name__]

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: None = None,
        attention_mask: Tensor | None = None,
        *,
        longspan: Context | None = None,
        **_: object,  # position_ids, use_cache ...: layout-free
    ) -> Tensor:
        if longspan is None or "linear" not in longspan.scratch:
            raise UserError(
                "GatedDeltaNet was called without `longspan=Context` prepared for it: sequence boundaries are never "
                "guessed. Call the model through its adapter; for plain use load it with transformers"
            )
        if attention_mask is not None or cache_params is not None:
            raise UserError("GatedDeltaNet takes boundaries from `longspan=` and keeps no cache: pass neither")
        prepared = longspan.scratch["linear"]
        assert isinstance(prepared, LinearPrepared)
        mixed, z, b, a = self.project(self, hidden_states[0])
        out_THD = _mix(
            mixed,
            b,
            a,
            DeltaWeights(self.conv1d.weight[:, 0], self.A_log, self.dt_bias),
            shape=self.shape,
            prepared=prepared,
            layer=self.layer_idx,
        )
        value_dim = self.shape.value_dim
        normed = self.norm(out_THD.reshape(-1, value_dim), z.reshape(-1, value_dim))
        return self.out_proj(normed.reshape(1, hidden_states.shape[1], -1))


# torch.compile does not look inside: ranks talk there, and what it is given is made anew for each micro-step.
_mix = torch.compiler.disable(gated_delta)


def _project_qwen3_5(layer: nn.Module, hidden: Tensor) -> Projected:
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden)


def _project_qwen3_next(layer: nn.Module, hidden: Tensor) -> Projected:
    shape, tokens = layer.shape, hidden.shape[0]
    copies = shape.value_heads // shape.key_heads
    values = copies * shape.value_dim
    by_head = layer.in_proj_qkvz(hidden).reshape(tokens, shape.key_heads, -1)
    q, k, v, z = by_head.split([shape.key_dim, shape.key_dim, values, values], 2)
    b, a = layer.in_proj_ba(hidden).reshape(tokens, shape.key_heads, -1).split([copies, copies], 2)
    mixed = torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], 1)
    return mixed, z.reshape(tokens, -1), b.reshape(tokens, -1), a.reshape(tokens, -1)


PROJECTIONS: dict[str, Callable[[nn.Module, Tensor], Projected]] = {
    "Qwen3_5GatedDeltaNet": _project_qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _project_qwen3_5,
    "Qwen3NextGatedDeltaNet": _project_qwen3_next,
}


def replace_deltanets(model: nn.Module) -> DeltaShape:
    """Replace every GatedDeltaNet and zero-centred norm of `model`; returns the shape that all DeltaNets have."""
    replace_zero_centred_norms(model)
    found = [name for name, module in model.named_modules() if type(module).__name__ in PROJECTIONS]
    shapes = set()
    for name in found:
        parent, _, child = name.rpartition(".")
        layer = GatedDeltaNet(model.get_submodule(name))
        setattr(model.get_submodule(parent), child, layer)
        shapes.add(layer.shape)
    if len(shapes) != 1:
        raise UserError(
            f"{type(model).__name__} has recurrent layers of {len(shapes)} shapes; exactly one is supported"
        )
    return shapes.pop()


def prepare_recurrent(context: Context, embeds: Tensor) -> None:
    """Make this micro-step's pieces and kernel, for all recurrent layers and for their recomputation."""
    context.scratch["linear"] = prepare_linear(
        context.info, embeds.device, how=context.linear, dtype=embeds.dtype, selective=context.cache is not None
    )


def recurrent_refusal(how: str, size: int, shape: DeltaShape | None, family: str) -> str | None:
    """Why the recurrent layers of a model (`shape`; None: it has none) cannot cross `size` ranks by `how`."""
    if how != "heads":
        return None
    if shape is None:
        return f"linear='heads' says how recurrent layers cross ranks, and {family} has none. Leave linear='auto'."
    return heads_refusal(size, shape)
