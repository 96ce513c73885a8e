"""The oracle's own attention and Gated DeltaNet, straight from their definitions, in the dtype of their inputs.

HF's eager attention takes its softmax in fp32 and its chunked delta rule runs in fp32, which hides errors under 1e-7.
The oracle therefore registers a plain softmax attention with transformers' `AttentionInterface` and puts a plain
recurrence in place of each DeltaNet instance (same parameters under the same names; no class of transformers is
changed). One unpacked sample at a time: no boundaries, no cache, no dropout. Shapes as transformers has them: q [1,
H, L, D], k and v [1, H_kv, L, D] -> [1, L, H, D].
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

NAME = "longspan_oracle"


def plain_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, L, D]
    key: Tensor,  # [1, H_kv, L, D]
    value: Tensor,  # [1, H_kv, L, D]
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,  # [H], attention sinks
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """softmax(q k^T * scaling) v over the keys a query may see; a sink is one more logit without a value."""
    assert attention_mask is None and dropout == 0.0, "the oracle runs one unpacked sample without dropout"
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling  # [1, H, L, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if module.is_causal if is_causal is None else is_causal:
        scores = scores.masked_fill(~_visible(query.shape[2], sliding_window, scores.device), float("-inf"))
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : value.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: query i sees key j when j <= i and, with a window, i - j < window."""
    i = torch.arange(length, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    visible = j <= i
    return visible if window is None else visible & (i - j < window)


class PlainNorm(nn.Module):
    """x / rms(x) * (1 + weight), the zero-centred norm, in the dtype of x."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.eps

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class PlainGatedNorm(nn.Module):
    """x / rms(x) * weight * silu(gate), in the dtype of x."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.variance_epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight * functional.silu(gate)


class PlainDeltaNet(nn.Module):
    """Gated DeltaNet token by token (Yang et al. 2024, eq. 10), o = S^T q / sqrt(d):

    S = exp(g) S + k (beta (v - (exp(g) S)^T k))^T.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.num_v_heads, self.num_k_heads = source.num_v_heads, source.num_k_heads
        self.head_k_dim, self.head_v_dim = source.head_k_dim, source.head_v_dim
        self.key_dim = source.key_dim
        self.dt_bias, self.A_log = source.dt_bias, source.A_log
        for name, child in source.named_children():
            self.add_module(name, PlainGatedNorm(child) if name == "norm" else child)
        # Qwen3-Next interleaves its projections by key head; HF's own method undoes it
        next_style = type(source).__name__.startswith("Qwen3Next")
        self.reorder = source.fix_query_key_value_ordering if next_style else None

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:  # [1, L, E] -> [1, L, E]
        length = hidden_states.shape[1]
        mixed, z, b, a = self._project(hidden_states)
        mixed = functional.silu(self._convolve(mixed))
        query, key, value = mixed.split([self.key_dim, self.key_dim, mixed.shape[1] - 2 * self.key_dim], 1)
        copies = self.num_v_heads // self.num_k_heads
        query, key = (
            _unit(x.reshape(length, self.num_k_heads, self.head_k_dim)).repeat_interleave(copies, 1)
            for x in (query, key)
        )
        value = value.reshape(length, self.num_v_heads, self.head_v_dim)
        beta = b.sigmoid()  # [L, H_v]
        decay = torch.exp(-self.A_log.exp() * functional.softplus(a + self.dt_bias))  # [L, H_v]
        state = mixed.new_zeros(self.num_v_heads, self.head_k_dim, self.head_v_dim)
        outputs = []
        for t in range(length):
            state = decay[t][:, None, None] * state
            delta = beta[t][:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + key[t][:, :, None] * delta[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * self.head_k_dim**-0.5)
        normed = self.norm(torch.stack(outputs).reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(normed.reshape(1, length, -1))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mixed [L, C] (q, k, v), z [L, H_v D_v], b and a [L, H_v]."""
        if self.reorder is None:
            layers = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            mixed, z, b, a = (layer(hidden[0]) for layer in layers)
            return mixed, z, b, a
        query, key, value, z, b, a = self.reorder(self.in_proj_qkvz(hidden), self.in_proj_ba(hidden))
        length = hidden.shape[1]
        mixed = torch.cat([x.reshape(length, -1) for x in (query, key, value)], 1)
        return mixed, z.reshape(length, -1), b.reshape(length, -1), a.reshape(length, -1)

    def _convolve(self, x: Tensor) -> Tensor:  # [L, C] -> [L, C]
        """Causal depthwise convolution: out[t] = sum_i w[i] x[t - width + 1 + i], zeros before the sample."""
        width = self.conv1d.weight.shape[-1]
        padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
        return sum(padded[i : i + x.shape[0]] * self.conv1d.weight[:, 0, i] for i in range(width))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)  # 1e-6: the epsilon of HF and fla


# Norms of models with these layers lose 1e-7 to fp32 in the gradient of their weight, where they sum over tokens.
ZERO_CENTRED = ("Gemma3RMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm")


def use_plain_layers(model: nn.Module) -> None:
    """Switch this model instance to the definitions above."""
    AttentionInterface.register(NAME, plain_attention)
    model.set_attn_implementation(NAME)
    model.set_experts_implementation("eager")  # transformers' default, a grouped matmul, has no fp64
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("GatedDeltaNet"):
            _put(model, name, PlainDeltaNet(module))
    use_plain_norms(model)


def use_plain_norms(model: nn.Module) -> None:
    """The same for zero-centred norms alone."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ZERO_CENTRED:
            _put(model, name, PlainNorm(module))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
