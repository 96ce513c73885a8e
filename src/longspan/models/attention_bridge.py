"""The attention functions that transformers' AttentionInterface calls: from HF's tensors to a mixer and back.

`longspan` (decoder): q [1, H, T_local, D], k, v [1, H_kv, T_local, D] -> [1, T_local, H, D]; boundaries come only
from the forward keyword `longspan=Context`. `longspan_flash_vision` (tower): full attention inside each image, one
varlen call for all images. HF walks images one by one unless the implementation's name contains "flash", and such a
name fails while a model is built; so `use_vision_bridge` sets it on the finished tower.

The views are undone in the order in which HF's modules made them, and by squeeze: then gradients are views of what the
kernel wrote. Compiled layers ask for contiguous [1, H, T, D], so kernels write heads first (kernels.heads_first); tokens
first, the three are copied once, 22 ms of a 64k row's step. `x[0]` would have them filled with zeros and copied first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longspan.errors import UserError
from longspan.mixers.blocks import Call
from longspan.mixers.kernels import Block
from longspan.mixers.local import Local, LocalPrepared
from longspan.models.adapter import Context

__all__ = ["DECODER", "VISION", "register", "use_vision_bridge"]

DECODER = "longspan"
VISION = "longspan_flash_vision"


def decoder_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    longspan: Context | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """HF attention signature; every other keyword (position_ids, use_cache ...) is layout-free and not needed here."""
    context = _context(longspan, module)
    if attention_mask is not None:
        raise UserError(
            "attention got a mask tensor; Longspan takes boundaries from `longspan=`: pass attention_mask=None"
        )
    if dropout:
        raise UserError(f"attention dropout {dropout} depends on the layout; set attention_dropout to 0")
    if softcap is not None:
        raise UserError(f"attention soft cap {softcap} is not supported by the mixers ({type(module).__name__})")
    out_THD = context.mixer.attend(
        query.transpose(1, 2).squeeze(0),  # [1, H, T, D] -> [T, H, D]
        key.transpose(1, 2).squeeze(0),
        value.transpose(1, 2).squeeze(0),
        context.prepared,
        scale=scaling,
        window=sliding_window,
        sink=s_aux,
        kernel=context.kernel,
        saved=context.slot(module),
    )
    return out_THD[None], None


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    longspan: Context | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """All images of this rank in one varlen call; the tower is never cut over ranks."""
    context = _context(longspan, module)
    block = Block(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, "full", offset=())
    out_THD = Local().attend(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        LocalPrepared(Call(None, None, block, fresh=True)),
        scale=scaling,
        kernel=context.kernel,
        saved=context.tower_slot(module),
    )
    return out_THD[None], None


def register() -> None:
    """Make both functions known to transformers; doing it again changes nothing.

    torch.compile does not look inside: mixers talk to other ranks and keep objects made anew for each micro-step.
    """
    AttentionInterface.register(DECODER, torch.compiler.disable(decoder_attention))
    AttentionInterface.register(VISION, torch.compiler.disable(vision_attention))


def use_vision_bridge(tower: PreTrainedModel) -> None:
    """Send a finished tower's attention through `longspan_flash_vision`."""
    tower.config._attn_implementation_internal = VISION


def _context(longspan: Context | None, module: nn.Module) -> Context:
    if longspan is None:
        raise UserError(
            f"{type(module).__name__} was called without `longspan=Context`: sequence boundaries are never guessed. "
            "Call the model through its adapter, or load it with another attn_implementation for plain use."
        )
    return longspan
