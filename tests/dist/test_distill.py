"""Full-vocabulary distillation against a second engine at cp 1 to 3 and dp 2, fp64: the loss and every parameter's
gradient are those of plain log-softmax [L, V] of two plain models on unpacked samples.

The teacher is wider and deeper than the student. Controls: teacher states off by one token, the other direction, an
untempered teacher. No [T, V] tensor arises on either side.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan import Engine, EngineConfig, Objective, Sample, launch
from longspan.layout import parse_layout
from longspan.models.loading import build_random
from longspan.models.tiny import tiny
from longspan.objective import chunks
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

STUDENT = "tiny:qwen3"
LAYOUTS = {  # ranks -> layouts that share a launch
    1: ("dp1",),
    2: ("cp2-ulysses", "cp2-ring", "cp2-gather", "dp2"),
    3: ("cp3-gather", "cp3-ring-zigzag"),
    4: ("dp2-cp2",),
}
SETTINGS = ("forward", "reverse")


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twice the student's size: width 48 against 32, 3 layers against 2, an untied output layer."""
    folder = tmp_path_factory.mktemp("teacher")
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "tie_word_embeddings": False}
    build_random(tiny("qwen3", **sizes), torch.float32, seed=7).save_pretrained(folder)
    return str(folder)


def samples() -> list[Sample]:
    """Ragged rows with holes in the mask, temperatures a token, and one row that trains nothing."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, length in enumerate((13, 1, 40, 7, 29, 3)):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > 0.3).float() * (number != 5)
        temperature = 0.6 + torch.rand(length, generator=generator).double()
        found.append(Sample(ids[:-1], ids[1:], mask, {"temperature": temperature}))
    return found


def build(model: str, layout: str, **settings: Any) -> Engine:
    defaults = {"dtype": "float64", "max_tokens_per_rank": 48}
    return Engine.build(EngineConfig(model, parse_layout(layout), **(defaults | settings)))


def trained_tokens() -> float:
    return float(sum(sample.mask.sum() for sample in samples()))


def run(student: Engine, teacher: Engine, parts: Sequence[Sequence[Sample]], direction: str) -> dict[str, Any]:
    """One call a part; all parts divide by the tokens of the whole batch."""
    objective, loss = Objective("distill_full", direction=direction, entropy=0.1), 0.0
    for part in parts:
        metrics = student.forward_backward(part, objective, denominator=trained_tokens(), teacher=teacher)
        loss += metrics["loss/distill_full"]
    found = {"loss": loss, "gradients": student.gradients()}
    student.clear_gradients()
    assert not teacher.backend.has_gradients()
    return found


def every_layout(ranks: int, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for layout in LAYOUTS[ranks]:
        student, teacher, whole = build(STUDENT, layout), build(folder, layout), samples()
        for direction in SETTINGS:
            found[layout, direction] = run(student, teacher, [whole], direction)
        found[layout, "calls"] = run(student, teacher, [whole[:2], whole[2:3], whole[3:]], "forward")
        found[layout, "alone"] = run(student, teacher, [whole[2:3]], "forward")  # with dp2 a rank has nothing
        with off_by_one(teacher):
            found[layout, "fault"] = run(student, teacher, [whole], "forward")
    return found


@contextmanager
def off_by_one(teacher: Engine):
    """The planted fault: the teacher's states of the token before."""
    right = teacher.backend.opened

    @contextmanager
    def wrong(step):
        with right(step) as (hidden, head):
            yield hidden.roll(1, 0), head

    teacher.backend.opened = wrong
    yield
    del teacher.backend.opened


class Oracle:
    """Both models by plain transformers; [L, V] on both sides."""

    def __init__(self, folder: str, student: str = STUDENT) -> None:
        self.student = Reference(student, dtype=torch.float64)
        self.teacher = Reference(folder, dtype=torch.float64)

    def expect(self, batch: Sequence[Sample], direction: str, *, total: float, tempered: bool = True) -> dict[str, Any]:
        self.student.clear()
        loss = 0.0
        for sample in batch:
            mine = self.student.outputs(sample)
            with torch.no_grad():
                bare = Sample(sample.input_ids, sample.target_ids, sample.mask, media=sample.media)
                theirs = self.teacher.outputs(sample if tempered else bare)
            p, q = mine.log_softmax, theirs.log_softmax
            kl = (q.exp() * (q - p)).sum(-1) if direction == "forward" else (p.exp() * (p - q)).sum(-1)
            weight = sample.mask.double() / total
            value = (weight * kl).sum()
            (value - 0.1 * (weight * mine.entropy).sum()).backward()
            loss += value.item()
        return {"loss": loss, "gradients": self.student.gradients()}


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of the loss and of every parameter's gradient, relative L2."""
    assert found["gradients"].keys() == wanted["gradients"].keys()
    errors = [abs(found["loss"] - wanted["loss"])]
    for name, want in wanted["gradients"].items():
        errors.append(((found["gradients"][name] - want).norm() / want.norm().clamp(min=1e-30)).item())
    return float(torch.tensor(errors, dtype=torch.float64).max())  # a NaN stays one


@pytest.fixture(scope="module")
def oracle(teacher_folder: str) -> Oracle:
    return Oracle(teacher_folder)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_gradients_are_those_of_plain_logits(ranks: int, teacher_folder: str, oracle: Oracle) -> None:
    batch, total = samples(), trained_tokens()
    wanted = {way: oracle.expect(batch, way, total=total) for way in SETTINGS}
    alone = oracle.expect(batch[2:3], "forward", total=total)
    untempered = oracle.expect(batch, "forward", total=total, tempered=False)
    for found in launch(every_layout, ranks, teacher_folder, ranks=ranks, timeout_s=100):
        for layout in LAYOUTS[ranks]:
            errors = [worst(found[layout, way], wanted[way]) for way in SETTINGS]
            errors += [worst(found[layout, "calls"], wanted["forward"]), worst(found[layout, "alone"], alone)]
            print(f"{layout}: {max(errors):.1e}")
            assert max(errors) < 1e-10
            assert worst(found[layout, "fault"], wanted["forward"]) > 1e-2
            assert worst(found[layout, "forward"], wanted["reverse"]) > 1e-2
            assert worst(found[layout, "forward"], untempered) > 1e-2


# The teacher's top k ----------------------------------------------------------------------------------------


def likeliest(folder: str) -> dict[int, dict[str, Any]]:
    """Gradients of distill_topk on what a teacher under another layout found; K = V is the whole forward KL."""
    student, teacher, found = build(STUDENT, "dp2"), build(folder, "cp2-ring"), {}
    for topk in (5, 97):
        outputs = teacher.forward(samples(), ("teacher_ids", "teacher_logprob"), topk=topk)
        taught = [
            Sample(s.input_ids, s.target_ids, s.mask, s.fields | o) for s, o in zip(samples(), outputs, strict=True)
        ]
        metrics = student.forward_backward(taught, Objective("distill_topk", entropy=0.1))
        found[topk] = {"loss": metrics["loss/distill_topk"], "gradients": student.gradients()}
        student.clear_gradients()
    return found


def test_top_k_of_a_teacher(teacher_folder: str, oracle: Oracle) -> None:
    batch, total = samples(), trained_tokens()
    found = launch(likeliest, teacher_folder, ranks=2, timeout_s=60)[1]
    whole = oracle.expect(batch, "forward", total=total)
    assert worst(found[97], whole) < 1e-10
    assert worst(found[5], whole) > 1e-2
    oracle.student.clear()
    loss = 0.0
    for sample in batch:
        mine = oracle.student.outputs(sample)
        with torch.no_grad():
            q = oracle.teacher.outputs(sample).log_softmax.topk(5)
        kl = (q.values.exp() * (q.values - mine.log_softmax.gather(1, q.indices))).sum(-1)
        value = (sample.mask.double() / total * kl).sum()
        (value - 0.1 * (sample.mask.double() / total * mine.entropy).sum()).backward()
        loss += value.item()
    error = worst(found[5], {"loss": loss, "gradients": oracle.student.gradients()})
    print(f"top 5: {error:.1e}")
    assert error < 1e-10


# Other students and teachers ---------------------------------------------------------------------------------


def unlike(folder: str) -> dict[str, Any]:
    """A LoRA student; a teacher with experts over ranks, another mixer and capped logits; rows of dynamic CP; both sides
    in host memory."""
    found, whole = {}, samples()
    adapted = build(STUDENT, "cp2-ring", lora={"a": LoraConfig(r=4, target_modules=["q_proj", "down_proj"])})
    found["lora"] = run(adapted, build(folder, "cp2-ulysses-zigzag"), [whole], "forward")
    found["factors"] = adapted.state_dict()
    found["moe"] = run(build(STUDENT, "cp2-ulysses"), build("tiny:qwen3_moe", "cp2-gather-ep2"), [whole], "reverse")
    found["capped"] = run(build(STUDENT, "dp2"), build("tiny:gemma3", "dp2"), [whole], "forward")
    student, teacher = (build(model, "cp2-ring-contiguous", dynamic_cp=True) for model in (STUDENT, folder))
    found["dynamic"] = run(student, teacher, [whole], "forward")
    student = build(STUDENT, "dp2", offload=("checkpoints",), recompute="full")
    found["host"] = run(student, build(folder, "dp2", offload=("parameters", "checkpoints")), [whole], "forward")
    return found


def test_unlike_students_and_teachers(teacher_folder: str, oracle: Oracle) -> None:
    found = launch(unlike, teacher_folder, ranks=2, timeout_s=100)[0]
    batch, total = samples(), trained_tokens()
    wanted = oracle.expect(batch, "forward", total=total)
    for name, gradient in found["lora"]["gradients"].items():
        if ".lora_B." in name:  # B is 0: dB = alpha / r * dW A^T, and A has no gradient
            factor = found["factors"][name.replace("lora_B", "lora_A")].double()
            base = wanted["gradients"][name.split(".lora_B")[0] + ".weight"]
            want = 8 / 4 * base @ factor.T
            assert (gradient - want).norm() < 1e-10 * want.norm(), name
        else:
            assert not gradient.any(), name
    assert abs(found["lora"]["loss"] - wanted["loss"]) < 1e-10
    assert worst(found["dynamic"], wanted) < 1e-10 and worst(found["host"], wanted) < 1e-10
    for way, direction, teacher in (("moe", "reverse", "tiny:qwen3_moe"), ("capped", "forward", "tiny:gemma3")):
        error = worst(found[way], Oracle(teacher).expect(batch, direction, total=total))
        print(f"{way}: {error:.1e}")
        assert error < 1e-10


def mixed_loss(out: Any, fields: Any) -> Tensor:
    """A callable that reads both the target's log-prob and the teacher."""
    return -out.logprob + 0.5 * out.teacher_kl


def see_images(batch: list[Sample]) -> dict[str, Any]:
    student, teacher = build("tiny:qwen3_vl", "cp2-ulysses"), build("tiny:qwen3_vl", "cp2-ring-contiguous", seed=5)
    objective = Objective(mixed_loss, uses=("teacher_kl",), fields=())
    metrics = student.forward_backward(batch, objective, normalise="sum", teacher=teacher)
    return {"loss": metrics["loss/mixed_loss"], "gradients": student.gradients()}


def test_a_callable_with_images() -> None:
    mine, theirs = (Reference("tiny:qwen3_vl", dtype=torch.float64, seed=seed) for seed in (0, 5))
    batch = fill_fields(default_samples(mine, (30, 5, 44)), mine)
    total = 0.0
    for sample in batch:
        out = mine.outputs(sample)
        with torch.no_grad():
            q = theirs.outputs(sample).log_softmax
        kl = (q.exp() * (q - out.log_softmax)).sum(-1)
        value = (sample.mask.double() * (-out.logprob + 0.5 * kl)).sum()
        value.backward()
        total += value.item()
    found = launch(see_images, batch, ranks=2, timeout_s=60)[1]
    error = worst(found, {"loss": total, "gradients": mine.gradients()})
    print(f"images: {error:.1e}")
    assert error < 1e-10


# Memory -----------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The most rows of any [rows, V] tensor that an operation returns."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.most = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] == self.vocab:
                self.most = max(self.most, x.numel() // self.vocab)
        return out


def most_rows(folder: str) -> int:
    """Rows of logits, in a row of 400 tokens, when the budget holds 60 of both sides together."""
    chunks.BUDGET_BYTES["cpu"] = 60 * 2 * 97 * 8  # in this process only
    ids = torch.arange(400) % 90
    student, teacher = build(STUDENT, "dp1", max_tokens_per_rank=400), build(folder, "dp1", max_tokens_per_rank=400)
    with Seen(97) as seen:
        student.forward_backward([Sample(ids, ids, torch.ones(400))], Objective("distill_full"), teacher=teacher)
    return seen.most


def test_no_side_has_all_logits(teacher_folder: str) -> None:
    assert launch(most_rows, teacher_folder, ranks=1, timeout_s=60)[0] == 60
    reference = Reference(STUDENT, dtype=torch.float64)
    with Seen(97) as seen:  # control
        reference.outputs(Sample(torch.arange(90), torch.arange(90), torch.ones(90)))
    assert seen.most == 90


# Bad input --------------------------------------------------------------------------------------------------


def refusals(folder: str) -> dict[str, str]:
    student, found = build(STUDENT, "cp2-ulysses"), {}

    def attempt(name: str, teacher: Engine | str | None, objective: Objective) -> None:
        try:
            student.forward_backward(samples(), objective, teacher=teacher)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)

    full, good = Objective("distill_full"), build(STUDENT, "cp2-ulysses", seed=1)
    attempt("none", None, full)
    attempt("name", "tiny:qwen3", full)
    attempt("unread", good, Objective("cross_entropy"))
    attempt("self", student, full)
    attempt("vocabulary", build(folder, "cp2-ulysses"), full)
    attempt("index", build(STUDENT, "cp2-ring"), full)
    attempt("axis", build(STUDENT, "dp2"), full)
    attempt("budget", build(STUDENT, "cp2-ulysses", max_tokens_per_rank=40), full)
    attempt("dynamic", build(STUDENT, "cp2-ulysses", dynamic_cp=True), full)
    attempt("dtype", build(STUDENT, "cp2-ulysses", dtype="float32"), full)
    for name, outputs, topk in (
        ("no k", ("teacher_ids",), None),
        ("no output", ("logprob",), 5),
        ("large k", ("teacher_ids",), 98),
    ):
        try:
            student.forward(samples(), outputs, topk=topk)
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    good.config = dataclasses.replace(good.config, backend="megatron")
    attempt("backend", good, full)
    assert not student.backend.has_gradients()
    return found


def test_bad_teachers_are_refused_by_name(tmp_path: Path) -> None:
    build_random(tiny("qwen3", vocab_size=101), torch.float32, seed=0).save_pretrained(tmp_path)
    expected = {
        "none": "needs teacher=", "name": "teacher='tiny:qwen3' must be an Engine", "unread": "reads no teacher", "self": "second engine", "vocabulary": "101 ids",
        "index": "index='zigzag'", "axis": "dp=2", "budget": "max_tokens_per_rank=40", "dynamic": "dynamic_cp",
        "backend": "megatron", "dtype": "float32", "no k": "topk=None", "no output": "topk=5", "large k": "97",
    }  # fmt: skip
    for found in launch(refusals, str(tmp_path), ranks=2, timeout_s=60):
        for name, part in expected.items():
            assert part in found[name], (name, found[name])
        assert "97" in found["vocabulary"]
    with pytest.raises(ValueError, match="sideways"):
        Objective("distill_full", direction="sideways")
