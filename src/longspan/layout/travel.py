"""Host tensors on their way to the device, without the host waiting for it.

From pageable memory a copy waits until all that was asked of the device before is done, so a host that runs ahead of its GPU would
stand still; from pinned memory it does not. The pinned memory is let go here: torch's allocator gives it to nobody before the
copy has ended. On a CPU nothing travels.
"""

import torch
from torch import Tensor

__all__ = ["sent"]


def sent(x: Tensor, device: torch.device) -> Tensor:
    """x on the device."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.contiguous().pin_memory()  # itself where it is so already
    return x.to(device, non_blocking=True)
