"""Gated DeltaNet from its definition, token by token, in the dtype of its inputs: what every other form here is
tested against.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T        o_t = S_t^T q_t / sqrt(D_k)

S [H, D_k, D_v] starts from zero (or `initial`) at each document; q and k are first made unit vectors. Before it, a
causal depthwise convolution of width K over the document's own tokens. Source: Yang, Kautz, Hatamizadeh 2024, "Gated
Delta Networks", eq. 10, and `torch_recurrent_gated_delta_rule` of transformers 5.17, which computes in fp32 whatever
it is given. Nothing here is shared with the engine's forms, and nothing here is fast: autograd keeps one state per
token.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["convolution", "packed_convolution", "packed_recurrence", "recurrence", "unit", "use_plain_recurrence"]

EPSILON = 1e-6  # inside the root of the unit vectors: transformers' and fla's


def unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) along the last dim."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def recurrence(
    q: Tensor,  # [L, H_k, D_k], not normalised
    k: Tensor,  # [L, H_k, D_k], not normalised
    v: Tensor,  # [L, H, D_v], H a multiple of H_k
    g: Tensor,  # [L, H], log of the decay
    beta: Tensor,  # [L, H]
    initial: Tensor | None = None,  # [H, D_k, D_v]
) -> tuple[Tensor, Tensor]:  # [L, H, D_v], final state [H, D_k, D_v]
    """One document."""
    copies = v.shape[1] // k.shape[1]
    q, k = unit(q).repeat_interleave(copies, 1), unit(k).repeat_interleave(copies, 1)
    state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]) if initial is None else initial
    outputs = []
    for t in range(v.shape[0]):
        state = torch.exp(g[t])[:, None, None] * state
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * k.shape[2] ** -0.5)
    return (torch.stack(outputs) if outputs else torch.zeros_like(v)), state


def packed_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int],
    initial: Tensor | None = None,  # [S, H, D_k, D_v]
) -> tuple[Tensor, Tensor]:  # [T, H, D_v], final states [S, H, D_k, D_v]
    """A packed stream: every document by itself."""
    outputs, finals = [], []
    for number, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        parts = [x[start:end] for x in (q, k, v, g, beta)]
        out, final = recurrence(*parts, initial=None if initial is None else initial[number])
        outputs.append(out)
        finals.append(final)
    return torch.cat(outputs), torch.stack(finals)


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """x [L, C], weight [C, K] -> [L, C]: out[t] = sum_i weight[:, i] x[t - K + 1 + i], zeros before the document."""
    width = weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    return torch.stack([padded[i : i + x.shape[0]] * weight[:, i] for i in range(width)]).sum(0)


def packed_convolution(x: Tensor, weight: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """x [T, C] packed: every document by itself."""
    return torch.cat([convolution(x[a:b], weight) for a, b in itertools.pairwise(cu_seqlens)])


class _PlainDeltaNet(nn.Module):
    """The whole layer on one unpacked document; parameters and their names are those of the module it replaces."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        for name, child in source.named_children():
            self.add_module(name, child)
        self.epsilon = source.norm.variance_epsilon
        self.dt_bias, self.A_log = source.dt_bias, source.A_log
        self.key_heads, self.value_heads = source.num_k_heads, source.num_v_heads
        self.key_dim, self.value_dim = source.head_k_dim, source.head_v_dim

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:  # [1, L, E] -> [1, L, E]
        assert hidden_states.shape[0] == 1, "the oracle runs one unpacked document"
        mixed, z, b, a = self.project(hidden_states[0])
        length = mixed.shape[0]
        mixed = functional.silu(convolution(mixed, self.conv1d.weight[:, 0]))
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], 1)
        g = -self.A_log.exp() * functional.softplus(a + self.dt_bias)
        out, _ = recurrence(
            q.reshape(length, self.key_heads, self.key_dim),
            k.reshape(length, self.key_heads, self.key_dim),
            v.reshape(length, self.value_heads, self.value_dim),
            g,
            b.sigmoid(),
        )
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.norm.weight
        return self.out_proj(out.reshape(1, length, -1) * functional.silu(z)[None])


class _PlainQwen35(_PlainDeltaNet):
    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)


class _PlainQwen3Next(_PlainDeltaNet):
    """Its projections interleave by key head: [q, k, v of the head's value heads, z of them], then [b, a] likewise."""

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        length, copies = hidden.shape[0], self.value_heads // self.key_heads
        wide = copies * self.value_dim
        both = self.in_proj_qkvz(hidden).reshape(length, self.key_heads, 2 * self.key_dim + 2 * wide)
        q, k, v, z = both.split([self.key_dim, self.key_dim, wide, wide], 2)
        b, a = self.in_proj_ba(hidden).reshape(length, self.key_heads, 2 * copies).split([copies, copies], 2)
        mixed = torch.cat([x.reshape(length, -1) for x in (q, k, v)], 1)
        return mixed, z.reshape(length, -1), b.reshape(length, -1), a.reshape(length, -1)


class _PlainZeroCentredNorm(nn.Module):
    """x / rms(x) * (1 + weight), in the dtype of x; transformers computes it in fp32."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = source.weight, source.eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * (1.0 + self.weight)


ORACLES = {
    "Qwen3_5GatedDeltaNet": _PlainQwen35,
    "Qwen3_5MoeGatedDeltaNet": _PlainQwen35,
    "Qwen3NextGatedDeltaNet": _PlainQwen3Next,
    "Qwen3_5RMSNorm": _PlainZeroCentredNorm,
    "Qwen3_5MoeRMSNorm": _PlainZeroCentredNorm,
    "Qwen3NextRMSNorm": _PlainZeroCentredNorm,
}


def use_plain_recurrence(model: nn.Module) -> None:
    """In one plain transformers model: put the plain form in place of each GatedDeltaNet and each zero-centred norm.

    Parameters stay the same objects under the same names. For one unpacked document at a time.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ORACLES:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ORACLES[type(module).__name__](module))
