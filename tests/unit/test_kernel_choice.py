"""The choice of a kernel is visible, honoured or refused; a wrong kernel does not pass the start-up check."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.mixers.kernels import Block, Kernel
from longspan.mixers.kernels.choose import choose_kernel, describe, self_check
from longspan.mixers.kernels.reference import Reference

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Faulty:
    """Reference with a planted fault in one result."""

    fault: str
    name: str = "faulty"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = Reference().forward(
            q, k, v, block, scale=scale * (1.02 if self.fault == "scale" else 1), window=window
        )
        return out, lse.nan_to_num(neginf=float("inf")) if self.fault == "lse" else lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = Reference().backward(dout, q, k, v, out, lse, block, scale=scale, window=window)
        return dq * (1.01 if self.fault == "dq" else 1), dk, dv


def check(kernel: Kernel, window: int | None = None) -> dict[str, float]:
    return self_check(kernel, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, device=CPU, window=window)


def test_cpu_kernel_passes_its_check_and_is_described() -> None:
    kernel = choose_kernel(CPU, torch.float32, 8)
    errors = check(kernel, window=20)
    assert max(errors.values()) < 1e-5
    assert {name.split("/")[0] for name in errors} == {"causal", "full", "window", "two blocks"}
    line = describe(kernel, CPU, torch.float32, 8)
    assert kernel.name in line
    assert "flash4 needs a CUDA device, got cpu" in line


@pytest.mark.parametrize("fault", ["scale", "lse", "dq"])
def test_self_check_refuses_a_planted_fault(fault: str) -> None:
    with pytest.raises(UserError, match="'faulty' is wrong here"):
        check(Faulty(fault))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("flash4", "needs a CUDA device"), ("flash2", "needs a CUDA device"), ("flash9", "is not one of")],
)
def test_a_kernel_that_cannot_run_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        choose_kernel(CPU, torch.bfloat16, 64, name=name)
