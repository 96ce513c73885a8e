"""The batch of the equality tests: ragged lengths, rows shorter than any CP, masks with holes, a row that trains nothing; and
two calls, of which the second leaves ranks with nothing to do under every layout, since it has one token.

Oracle: `truth`, parity/reference.py on the same samples one by one. The calls add up to it, for they share a denominator.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longspan import Engine, Sample
from longspan.parity import Reference
from longspan.parity.cases import Case
from longspan.parity.reference import Result

LENGTHS = (13, 1, 40, 7, 29, 3)
SHORT, SILENT = 1, 5  # the row of one token, which is trained, and the row without a trained token
RULE = {"normalise": "constant", "denominator": 60.0}


def ragged(
    seed: int = 1,
    *,
    adapters: Sequence[str | None] = (None,),
    lengths: Sequence[int] = LENGTHS,
    tempered: bool = True,
) -> list[Sample]:
    """Rows for every policy loss; tempered: those with an odd number have temperatures."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > 0.3).float() * (number != SILENT)
        mask[-1] = float(number != SILENT)
        fields = {
            "advantage": torch.randn(length, generator=generator).double(),
            "old_logprob": -4.5 + 0.3 * torch.randn(length, generator=generator).double(),
        }
        if tempered and number % 2:
            fields["temperature"] = 0.6 + torch.rand(length, generator=generator).double()
        found.append(Sample(ids[:-1], ids[1:], mask, fields, adapter=adapters[number % len(adapters)]))
    return found


def calls(samples: Sequence[Sample]) -> list[list[Sample]]:
    """All rows but the one of one token, then that one alone."""
    return [[sample for number, sample in enumerate(samples) if number != SHORT], [samples[SHORT]]]


def train(engine: Engine, samples: Sequence[Sample], case: Case) -> dict[str, float]:
    """The calls of a case; loss/<term> and tok/trained of all of them."""
    assert (case.normalise, case.denominator) == (RULE["normalise"], RULE["denominator"]), "calls share a denominator"
    told = [engine.forward_backward(part, case.objective(), **RULE) for part in calls(samples)]
    return {name: sum(each[name] for each in told) for name in told[0] if name.startswith(("loss/", "tok/trained"))}


def truth(model: str, samples: Sequence[Sample], case: Case) -> Result:
    return Reference(model, dtype=torch.float64).run(samples, case)


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest relative L2 error of any parameter; a NaN stays one."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:3]
    errors = [(found[name] - want).norm() / want.norm().clamp(min=1e-30) for name, want in wanted.items()]
    return float(torch.stack(errors).max())


def gap(found: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """Largest difference of the sums that `train` told, relative above 1."""
    return max(abs(value - wanted[name]) / max(1.0, abs(wanted[name])) for name, value in found.items())
