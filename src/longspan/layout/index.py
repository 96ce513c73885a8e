"""Where each token of a stream lives: one index vector per rank; together they are a permutation of arange(T).

contiguous: rank r of N keeps the r-th of N equal runs of the stream.
zigzag:     rank r keeps chunks r and 2N-1-r of each document, so that causal work is equal (Llama 3, sec. 3.3.2).
identity:   everything; any layout of one rank.
Padding is no business of this file: cu_seqlens already counts it (data.padded_length).
"""

import torch
from torch import Tensor

from longspan.errors import UserError

__all__ = ["inverse", "layout_index"]


def layout_index(kind: str, cu_seqlens: Tensor, size: int) -> list[Tensor]:
    """For each of `size` ranks the stream positions it holds, ascending within a document: int64 [T / size]."""
    total = int(cu_seqlens[-1])
    if size == 1:
        return [torch.arange(total)]
    match kind:
        case "contiguous":
            if total % size:
                raise UserError(f"contiguous: a stream of {total} tokens does not cut into {size} equal runs. Pad it.")
            return list(torch.arange(total).chunk(size))
        case "zigzag":
            return _zigzag(cu_seqlens.long(), size)
        case _:
            raise UserError(f"index {kind!r} for {size} ranks is unknown. Use 'contiguous' or 'zigzag'.")


def inverse(indices: list[Tensor]) -> Tensor:
    """Row of each stream token in the concatenated shards: int64 [T]. cat(shards)[inverse] is the stream."""
    order = torch.cat(indices)
    result = torch.empty_like(order)
    result[order] = torch.arange(order.numel())
    return result


def _zigzag(cu: Tensor, size: int) -> list[Tensor]:
    lengths = cu.diff()
    if (lengths % (2 * size)).any():
        bad = lengths[lengths % (2 * size) != 0][0]
        raise UserError(
            f"zigzag: a document of {int(bad)} tokens does not cut into 2 * {size} chunks. Pad each to {2 * size}."
        )
    chunk = lengths // (2 * size)
    document = torch.arange(lengths.numel()).repeat_interleave(2 * chunk)  # of each local row, the same on every rank
    row = torch.arange(document.numel()) - (2 * chunk).cumsum(0).sub(2 * chunk)[document]  # inside its document
    chunk_row = chunk[document]
    early = row < chunk_row
    of_rank_0 = cu[:-1][document] + row + torch.where(early, 0, (2 * size - 2) * chunk_row)
    step = torch.where(early, chunk_row, -chunk_row)  # the next rank's chunks: one later, one earlier
    return [of_rank_0 + rank * step for rank in range(size)]
