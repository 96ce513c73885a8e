"""The attention schedules of axolotl-ringmaster (ringmaster/strategies/ulysses.py, ring/*.py of 0.2.7) as mixers to time.

Its rings call the private forward and backward of flash_attn 2.x, and its packed Ulysses the arguments of 2.x; both get
them from transformers: the flash_attn 2.x package or a kernel from the hub. flash-attn-4 takes other arguments
(no dropout_p, another order), so `lend` hands it our kernel behind those signatures: a row then differs from ours by
the schedule alone. Ulysses of one document also runs as shipped, on transformers' flash_attention_4.
Not here: zigzag and p2p of packed rows. Zigzag forms their whole score matrix, p2p has no document mask.
q, k, v [T/N, H, D] -> [T/N, H, D]; the package's own shapes are [1, H, T/N, D] -> [1, T/N, H, D].
"""

from collections.abc import Callable
from functools import lru_cache, partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ringmaster import CPRuntime, RingmasterConfig, set_runtime
from ringmaster.ring import p2p_attn, varlen_blocks
from ringmaster.ring.distflash import distflash_attention
from ringmaster.ring.loop import varlen_ring_attention
from ringmaster.ring.zigzag import zigzag_ring_attention
from ringmaster.strategies import ulysses
from torch import Tensor

from longspan.mixers.attention import Work, core_attention
from longspan.mixers.blocks import Call
from longspan.mixers.kernels import Block, Kernel
from longspan.mixers.local import LocalPrepared

__all__ = ["NAME", "schedules"]

NAME = f"axolotl-ringmaster {version('axolotl-ringmaster')}"
FLASH = "flash_attention_2"  # the only name its rings accept
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Lent:
    """A kernel of ours behind the signatures of flash_attn 2.x."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, _: float, scale: float, causal: bool, *unused: Any) -> Any:
        """_flash_attn_forward: [1, T, H, D] -> out, lse [1, H, T] and two unused."""
        block = _dense(q.shape[1], k.shape[1], causal, q.device)
        out, lse = self.kernel.forward(q[0], k[0], v[0], block, scale=scale)
        return out[None], lse[None], None, None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, _: float, scale: float, causal: bool, *unused: Any,
    ) -> None:  # fmt: skip
        """_flash_attn_backward: writes dq, dk, dv."""
        block = _dense(q.shape[1], k.shape[1], causal, q.device)
        found = self.kernel.backward(dout[0], q[0], k[0], v[0], out[0], lse[0], block, scale=scale)
        for into, x in zip((dq, dk, dv), found, strict=True):
            into[0].copy_(x)

    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        _: float, scale: float, causal: bool,
    ) -> Any:  # fmt: skip
        """_flash_attn_varlen_forward: [T, H, D] -> out, lse [H, T]."""
        return self.kernel.forward(q, k, v, _packed(cu_q, cu_k, max_q, max_k, causal), scale=scale)

    def varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        _: float, scale: float, causal: bool, *unused: Any,
    ) -> None:  # fmt: skip
        """_flash_attn_varlen_backward: writes dq, dk, dv."""
        block = _packed(cu_q, cu_k, max_q, max_k, causal)
        found = self.kernel.backward(dout, q, k, v, out, lse, block, scale=scale)
        for into, x in zip((dq, dk, dv), found, strict=True):
            into.copy_(x)

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        dropout_p: float, softmax_scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """flash_attn_varlen_func, differentiable."""
        call = Call(None, None, _packed(cu_q, cu_k, max_q, max_k, causal), fresh=True)
        return core_attention(LocalPrepared(call), q, k, v, work=Work(self.kernel, softmax_scale, None))


@lru_cache
def _dense(len_q: int, len_k: int, causal: bool, where: torch.device) -> Block:
    return Block.make([len_q], [len_k], kind="causal" if causal else "full", device=where)


def _packed(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool) -> Block:
    return Block(cu_q, cu_k, max_q, max_k, "causal" if causal else "full", offset=())


def lend(kernel: Kernel) -> None:
    """Replaces, in this process, the three places where the package asks transformers for a flash kernel."""
    lent = Lent(kernel)
    p2p_attn._resolve_flash_ops = lambda *_: (lent.forward, lent.backward)
    varlen_blocks._flash_varlen_ops = lambda *_: (lent.varlen_forward, lent.varlen_backward)
    ulysses._flash_varlen_fn = lambda _: lent.varlen


def schedules(
    lengths: tuple[int, ...], kernel: Kernel, cu_seqlens: Tensor, scale: float
) -> list[tuple[str, str, str, Run]]:
    """(name, kernel, index layout, how it attends) of each schedule with a flash path for this row. cu_seqlens [S+1] int32."""
    lend(kernel)
    group, lent, one = dist.group.WORLD, f"{kernel.name} lent", len(lengths) == 1
    gather = partial(varlen_ring_attention, cu_seqlens=cu_seqlens, attn_implementation=FLASH)
    balanced = partial(distflash_attention, cu_seqlens=None if one else cu_seqlens, attn_implementation=FLASH)
    rings = [("all-gather ring", "contiguous", gather), ("distflash ring", "contiguous", balanced)]
    if one:
        rings.append(("zigzag ring", "zigzag", partial(zigzag_ring_attention)))
    found = [("ulysses", lent, "contiguous", _ulysses(FLASH, (cu_seqlens, max(lengths)), scale))]
    found += [(name, lent, kind, _batched(partial(ring, group=group, scaling=scale))) for name, kind, ring in rings]
    if one:
        shipped = "flash_attention_4" if cu_seqlens.is_cuda else "sdpa"
        found.append(("ulysses", f"{shipped} of transformers", "contiguous", _ulysses(shipped, None, scale)))
    return found


def _batched(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    """[T/N, H, D] as the views that a transformers layer hands over."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0]

    return run


def _ulysses(inner: str, packing: tuple[Tensor, int] | None, scale: float) -> Run:
    """Its attention function reads the group and the packing from a process-wide runtime: set before each call."""
    group = dist.group.WORLD
    runtime = CPRuntime(
        RingmasterConfig(size=dist.get_world_size()), ulysses_group=group, cp_group=group, varlen=packing
    )
    attend = ulysses.make_ulysses_attention(inner)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_runtime(runtime)
        layer: Any = SimpleNamespace(
            is_causal=True, num_key_value_groups=q.shape[1] // k.shape[1], config=SimpleNamespace()
        )
        return attend(layer, q, k, v, None, scaling=scale)[0]

    return _batched(run)
