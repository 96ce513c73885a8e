"""Kind H, heads and data inside a context-parallel group."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kit import Question, ask, build, changed, check, rows

from longspan.data import Image, Sample
from longspan.engine import Engine, EngineConfig
from longspan.engine.backend import MicroStep
from longspan.errors import RankError, UserError
from longspan.launch import launch, world
from longspan.layout import Layout, Mesh, make_seqinfo, resolve
from longspan.mixers import make_mixer, naive
from longspan.mixers.kernels.reference import Reference
from longspan.models.tiny import tiny
from longspan.objective import Objective
from longspan.parity.faults import planted
from longspan.parity.reference import auto_class

RAGGED = rows((9, 5, 14, 3, 8))


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory) -> str:
    """A folder with a model of 8 query and 2 KV heads."""
    folder = tmp_path_factory.mktemp("heads") / "model"
    config = tiny("qwen3", num_attention_heads=8, num_key_value_heads=2)
    torch.manual_seed(0)
    auto_class(config).from_config(config).save_pretrained(folder)
    return str(folder)


def test_h1_kv_heads_are_repeated_and_their_gradients_summed(eight_heads):
    """8 query and 2 KV heads on 2 and 4 Ulysses ranks; log-probs and every gradient."""
    samples = rows((13, 6), model=eight_heads)
    questions = {
        "h1": Question(samples, model=eight_heads, layouts=("dp2-cp2-ulysses", "cp4-ulysses"), fault="kv-copies")
    }
    check("h1", questions, ask(questions, ranks=4))


def on_eight() -> list[float]:
    """Relative errors of out, dq, dk, dv of 8 query and 2 KV heads on 8 Ulysses ranks; the last of dk without the sum."""
    here = world()
    group = Mesh(Layout(cp=here.ranks), ranks=here.ranks, rank=here.rank, device=here.device).group(0, here.ranks)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(24, heads, 8, generator=generator, dtype=torch.float64) for heads in (8, 2, 2, 8))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = naive.attention(*leaves, position=torch.arange(24), segment=torch.zeros(24, dtype=torch.int64), scale=0.3)
    expected = [want.detach(), *torch.autograd.grad(want, leaves, dout)]
    info = make_seqinfo("contiguous", torch.tensor([0, 24], dtype=torch.int32), group)
    own = [x[info.index].requires_grad_() for x in (q, k, v)]
    mixer = make_mixer(Layout(cp=here.ranks, mixer="ulysses"))
    prepared = mixer.prepare(info, here.device)
    out = mixer.attend(*own, prepared, scale=0.3, window=None, sink=None, kernel=Reference())
    found = [out.detach(), *torch.autograd.grad(out, own, dout[info.index])]
    errors = [float((a - b[info.index]).norm() / b[info.index].norm()) for a, b in zip(found, expected, strict=True)]
    return [*errors, float((found[2] / 4 - expected[2][info.index]).norm() / expected[2][info.index].norm())]


def test_h1_two_kv_heads_serve_eight_ranks():
    """Four copies of each KV head: their gradients are added up; one copy's share (control) is far off."""
    for *errors, control in launch(on_eight, ranks=8, timeout_s=60, device="cpu"):
        assert max(errors) < 1e-12 and control > 0.1


@pytest.mark.parametrize(
    ("kv_heads", "message"),
    [
        (2, r"ulysses=4 needs query heads divisible by 4, got 6.*Use ulysses in \(1, 2, 3, 6\)"),
        (4, "6 query heads are no multiple of 4 KV heads"),
    ],
)
def test_h1_the_refusal_states_the_rule(kv_heads, message):
    with pytest.raises(UserError, match=message):
        resolve(Layout(cp=4, mixer="ulysses"), heads=6, kv_heads=kv_heads, recurrent=False, windowed=False)


def seen() -> list[tuple[tuple[int, ...], list[int]]]:
    """Of each micro-step: the rows that this rank runs, and which of the batch's tokens it holds."""
    engine = build("tiny:qwen3", "dp2-cp2-ring", [len(sample) for sample in RAGGED], tight=True)
    found = []
    steps = engine.builder.steps

    def watched(*args: object) -> Iterator[MicroStep]:
        for step in steps(*args):
            tokens = step.shard.fields["token"]
            found.append((step.shard.samples, tokens[tokens >= 0].tolist()))
            yield step

    engine.builder.steps = watched
    engine.forward_backward(RAGGED, Objective("cross_entropy"))
    return found


def seen_with_fault() -> list[tuple[tuple[int, ...], list[int]]]:
    with planted("duplicated-rows"):
        return seen()


def once(ranks: list[list[tuple[tuple[int, ...], list[int]]]]) -> bool:
    """Context ranks run the same rows, data ranks different ones, and every token is held exactly once."""
    tokens = sorted(token for rank in ranks for _, held in rank for token in held)
    same = all([row for row, _ in ranks[n]] == [row for row, _ in ranks[n + 1]] for n in (0, 2))
    apart = all(not set(a) & set(b) for (a, _), (b, _) in zip(ranks[0], ranks[2], strict=True))
    return same and apart and tokens == list(range(sum(len(sample) for sample in RAGGED)))


def test_h5_each_row_is_seen_once_in_a_step():
    assert once(launch(seen, ranks=4, timeout_s=60, device="cpu"))
    assert not once(launch(seen_with_fault, ranks=4, timeout_s=60, device="cpu"))


def pixels(value: int) -> np.ndarray:
    picture = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3).copy()
    picture[3, 5, 1] = value
    return picture


def perturbations() -> dict[str, str]:
    """What rank 1 gets otherwise than rank 0, and what every rank is told."""
    found = {}
    engine = build("tiny:qwen3", "cp2-ring", [9, 5], tight=False)
    odd = engine.rank == 1
    first, second = RAGGED[:2]
    token, target, mask = (getattr(first, name).clone() for name in ("input_ids", "target_ids", "mask"))
    token[4], target[2], mask[3] = (token[4] + odd) % 90, (target[2] + odd) % 90, float(not odd)
    nudged = first.fields["advantage"] + 1e-12 * odd
    vision = Engine.build(EngineConfig("tiny:qwen3_vl", Layout(cp=2), dtype="float64", max_tokens_per_rank=40))
    ids = torch.tensor([5, 95, 93, 93, 93, 93, 96, 7, 8])
    pictured = Sample(ids[:-1], ids[1:], [0, 0, 0, 0, 0, 0, 1, 1], media=[Image(pixels(100 + odd))])
    objective = Objective("reinforce")
    batches = {
        "token": (engine, [changed(first, input_ids=token), second]),
        "target": (engine, [changed(first, target_ids=target), second]),
        "mask": (engine, [changed(first, mask=mask), second]),
        "field": (engine, [changed(first, fields={"advantage": nudged}), second]),
        "order": (engine, [second, first] if odd else [first, second]),
        "missing": (engine, [first] if odd else [first, second]),
        "pixel": (vision, [pictured]),
    }
    for name, (asked, samples) in batches.items():
        try:
            asked.forward_backward(samples, Objective("cross_entropy") if name == "pixel" else objective)
            found[name] = "ran"
        except RankError as error:
            found[name] = str(error)
    engine.forward_backward([first, second], objective)  # control: equal batches run
    return found


def test_h7_a_batch_that_differs_on_one_context_rank_is_named():
    """A token, a target, a mask, a field by 1e-12, the order, the number of rows, one pixel of one image."""
    for told in launch(perturbations, ranks=2, timeout_s=60, device="cpu"):
        assert len(told) == 7
        for name, message in told.items():
            assert "rank 1" in message and "same samples" in message, (name, message)
