"""Head dims that a kernel cannot run, or runs wrongly, are padded with zeros to one that it can.

Zero columns of q and k add nothing to the scores, zero columns of v give output columns that are cut off again; the
scale stays that of the real head dim. x [T, H, D] -> [T, H, size] and back.
"""

import torch.nn.functional as F
from torch import Tensor

__all__ = ["pad_head_dim"]


def pad_head_dim(size: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors with zero columns up to `size`; the tensor itself where it has that size."""
    return [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in tensors]
