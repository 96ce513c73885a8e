"""Several forward_backward calls before one step: router losses add, and so do models that insist on dividing."""

import pytest
import torch
from megatron_cases import MODEL, installed, replaced

from longspan import Engine, EngineConfig, Objective, Sample, launch
from longspan.errors import UserError
from longspan.layout import parse_layout

SIZES = (1, 3, 2)  # samples a call
LENGTHS = (13, 1, 22, 7, 9, 30)
OBJECTIVE = Objective("reinforce", entropy=0.01, moe_aux=1.0, moe_z=0.1)


def samples():
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        made.append(
            Sample(ids[:-1], ids[1:], torch.ones(length), {"advantage": torch.randn(length, generator=generator)})
        )
    return made


def calls():
    given = iter(samples())
    return [[next(given) for _ in range(size)] for size in SIZES]


def accumulate(engine, parts, objective):
    for part in parts:
        engine.forward_backward(part, objective, normalise="token", denominator=float(sum(LENGTHS)))
    found = engine.gradients()
    engine.clear_gradients()
    return found


def divided(engine, parts, *, scaled):
    """The same on a model that divides each call's loss by its own tokens."""
    for part in parts:
        count = float(sum(map(len, part)))

        def dividing(real, count=count):
            return lambda *args: tuple(None if x is None else x / count for x in real(*args))

        with replaced(MODEL + "Stage.forward", dividing):
            if scaled:
                with engine.backend.per_call_grad_scaling(count):
                    engine.forward_backward(part, OBJECTIVE, normalise="token", denominator=float(sum(LENGTHS)))
            else:
                engine.forward_backward(part, OBJECTIVE, normalise="token", denominator=float(sum(LENGTHS)))
    found = engine.gradients()
    engine.clear_gradients()
    return found


def body():
    found = {}
    for name in ("tp2-sp", "cp2-ring-ep2"):
        config = EngineConfig(
            "tiny:qwen3_moe", layout=parse_layout(name), backend="megatron", dtype="float64", max_tokens_per_rank=48
        )
        engine = Engine.build(config)
        found[name] = {
            "one": accumulate(engine, [samples()], OBJECTIVE),
            "three": accumulate(engine, calls(), OBJECTIVE),
            "scaled": divided(engine, calls(), scaled=True),
            "divided": divided(engine, calls(), scaled=False),
        }
    with pytest.raises(UserError, match=r"per_call_grad_scaling\(0\)"), engine.backend.per_call_grad_scaling(0):
        pass
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return launch(body, ranks=2, timeout_s=120)[0]


def distance(got, want):
    return max(float((got[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in want.items())


@installed
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2-ring-ep2"])
def test_three_unequal_calls_equal_one(two_ranks, layout):
    found = two_ranks[layout]
    assert distance(found["three"], found["one"]) <= 1e-12


@installed
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2-ring-ep2"])
def test_calls_of_a_model_that_divides_add_under_per_call_grad_scaling(two_ranks, layout):
    found = two_ranks[layout]
    # not 1e-12: norms compute in fp32, as Hugging Face's, and round a gradient of another scale otherwise (2.3e-7)
    assert distance(found["scaled"], found["one"]) <= 1e-6
    assert distance(found["divided"], found["one"]) > 0.1, "without it they are averages"
