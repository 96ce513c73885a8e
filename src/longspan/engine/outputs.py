"""Per-token outputs back in the caller's order, whatever the layout was.

Every token of a batch has a number (the `token` stream, -1 for pads). Each rank puts its values at their numbers into one flat
buffer of zeros; a sum over the data ranks completes it, since each token lives on exactly one rank (law 3): exact, one collective.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layout import CPGroup

__all__ = ["Outputs", "TokenBuffer"]


class Outputs(dict[str, Tensor]):
    """Outputs of one sample by name, each [L, ...]; also read as attributes: out.logprob."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(f"no output {name!r}; this call asked for {sorted(self)}") from error


class TokenBuffer:
    """Collects one value per token of the batch. lengths: real tokens of each sample, in the caller's order."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.device = device
        self.flat: dict[str, Tensor] = {}  # name -> [N, ...]

    def put(self, name: str, values: Tensor, token: Tensor) -> None:
        """values [T_local, ...] of tokens numbered token [T_local]; pads (-1) are dropped into a spare last slot."""
        total = sum(self.lengths)
        if name not in self.flat:
            self.flat[name] = torch.zeros((total + 1, *values.shape[1:]), dtype=values.dtype, device=self.device)
        self.flat[name][torch.where(token >= 0, token, total)] = values.detach()

    def put_part(self, name: str, place: int, values: Tensor, token: Tensor) -> None:
        """values [T_local, n, ...]: a part of an output that `collect` joins along dim 1, in order of `place`."""
        self.put(f"{name}/{place:06d}", values, token)

    def collect(self, group: CPGroup) -> list[Outputs]:
        """One Outputs a sample, on the CPU, equal on every rank of the group."""
        columns: dict[str, list[Tensor]] = {}
        for name in sorted(self.flat):
            flat = self.flat[name][:-1]
            if group.group is not None:
                dist.all_reduce(flat, group=group.group)
            columns.setdefault(name.partition("/")[0], []).append(flat.cpu())
        made = {name: (x[0] if len(x) == 1 else torch.cat(x, 1)).split(self.lengths) for name, x in columns.items()}
        return [Outputs({name: parts[i] for name, parts in made.items()}) for i in range(len(self.lengths))]
