"""The engine's own promises on several ranks: calls add, checkpoints load under any layout, every rank must pass the same batch.

Exactness against plain Hugging Face is tests/parity's; here one engine is compared with itself over time and layouts, where the
claim is bit for bit or 1e-12, and with the oracle where rows change their sizes. Each comparison has a fault that it must see.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from longspan import (
    AdamW,
    CheckpointError,
    Engine,
    EngineConfig,
    Layout,
    Objective,
    OutOfMemory,
    RankError,
    Sample,
    UserError,
    launch,
)
from longspan.data import Plan, Row
from longspan.layout import parse_layout
from longspan.parity import Reference
from longspan.parity.cases import Case
from longspan.parity.faults import planted


def make_samples(lengths=(13, 1, 40, 7, 29, 3), seed=1):
    """Ragged rows with holes in the mask; the last one has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > 0.3).float()
        fields = {
            "advantage": torch.randn(length, generator=generator).double(),
            "old_logprob": -4.5 + 0.3 * torch.randn(length, generator=generator).double(),
        }
        samples.append(Sample(ids[:-1], ids[1:], mask * (number != len(lengths) - 1), fields))
    return samples


def build(name="dp1", **settings):
    defaults = {"model": "tiny:qwen3", "dtype": "float64", "max_tokens_per_rank": 48}
    return Engine.build(EngineConfig(layout=parse_layout(name), **(defaults | settings)))


def worst(a, b):
    return max(((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-30)).item() for name in b)


def calls_add(name):
    engine, samples, objective = build(name), make_samples(), Objective("importance_sampling", entropy=0.01)
    engine.forward_backward(samples, objective)
    whole = engine.gradients()
    engine.clear_gradients()
    total = float(sum(sample.mask.sum() for sample in samples))
    for part in (samples[:1], samples[1:4], samples[4:5], samples[5:]):  # the last call has all-zero weights (bug A2)
        engine.forward_backward(part, objective, denominator=total)
        engine.forward(part)  # a forward in between changes nothing
    return worst(engine.gradients(), whole)


@pytest.mark.parametrize("name", ["dp1", "cp3-ring", "dp2-cp2"])
def test_calls_add(name):
    assert max(launch(calls_add, name, ranks=parse_layout(name).ranks, timeout_s=60)) <= 1e-12


def lost_call(name):
    engine, samples = build(name), make_samples()
    engine.forward_backward(samples, Objective("importance_sampling"))
    whole = engine.gradients()
    engine.clear_gradients()
    total = float(sum(sample.mask.sum() for sample in samples))
    engine.forward_backward(samples[:3], Objective("importance_sampling"), denominator=total)
    engine.clear_gradients()  # the planted fault: gradients of the first call are lost
    engine.forward_backward(samples[3:], Objective("importance_sampling"), denominator=total)
    return worst(engine.gradients(), whole)


def test_a_lost_call_is_seen():
    assert launch(lost_call, "dp1", ranks=1, timeout_s=60)[0] > 1e-2


MIXED = Plan(  # rows of 4, 3, 2 and 1 ranks, one of them inert, one shorter than its ranks
    (
        (Row((0,), 0, 4),),
        (Row((2, 4), 0, 1), Row((9, 3), 1, 3)),
        (Row((8,), 0, 2), Row((1, 6), 2, 1), Row((), 3, 1)),
        (Row((7,), 0, 1), Row((5,), 1, 2), Row((), 3, 1)),
    ),
    4,
)


LENGTHS = (250, 3, 40, 17, 60, 1, 50, 33, 150, 100)


def dynamic(name, fault=None):
    samples, objective = make_samples(LENGTHS), Objective("gspo", clip=0.2, entropy=0.01)
    fixed = build(name, max_tokens_per_rank=80)
    metrics = fixed.forward_backward(samples, objective)
    with planted(fault):
        engine = build(name, dynamic_cp=True, max_tokens_per_rank=80)
        engine.planner.plan = lambda batch: MIXED
        mixed = engine.forward_backward(samples, objective)
    gap = max(abs(mixed[key] - metrics[key]) for key in metrics if not key.startswith(("time", "mem", "plan")))
    return worst(engine.gradients(), fixed.gradients()), gap, engine.gradients()


@pytest.mark.parametrize("name", ["cp4-ring", "cp4-gather"])
def test_dynamic_cp_is_exact(name):
    gradient, metric, gradients = launch(dynamic, name, ranks=4, timeout_s=60)[0]
    assert gradient <= 1e-12 and metric <= 1e-9
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    oracle = reference.run(make_samples(LENGTHS), Case("gspo", "gspo", {"clip": 0.2, "entropy": 0.01})).gradients
    assert worst(gradients, oracle) <= 1e-8


def test_a_sequence_ratio_of_one_rank_is_seen():
    """The planted fault of the test above: gspo's mean over a rank's own tokens, where rows have other sizes."""
    gradient, _, _ = launch(dynamic, "cp4-ring", "gspo-local", ranks=4, timeout_s=60)[0]
    assert gradient > 1e-4


def train_and_save(name, folder, steps):
    engine = build(name)
    for step in range(steps):
        engine.forward_backward(make_samples(seed=step), Objective("importance_sampling"))
        engine.optim_step(AdamW(lr=1e-2, clip_norm=1.0))
    engine.save(folder)
    return engine.state_dict()


def resume(name, folder, steps, optimizer):
    engine = build(name, seed=5)  # other weights until loaded
    engine.load(folder, optimizer=optimizer)
    loaded = engine.state_dict()
    for step in range(2, 2 + steps):
        engine.forward_backward(make_samples(seed=step), Objective("importance_sampling"))
        engine.optim_step(AdamW(lr=1e-2, clip_norm=1.0))
    return loaded, engine.state_dict()


def test_checkpoints_load_under_any_layout(tmp_path):
    """K7, K13: weights bit for bit anywhere; a continued run bit for bit under the same layout; moments matter."""
    folder = str(tmp_path / "two")
    saved = launch(train_and_save, "dp2", folder, 2, ranks=2, timeout_s=60)[0]
    uninterrupted = launch(train_and_save, "dp2", str(tmp_path / "three"), 3, ranks=2, timeout_s=60)[0]
    for name in ("dp2", "cp3-ring", "dp1"):
        loaded, after = launch(resume, name, folder, 1, True, ranks=parse_layout(name).ranks, timeout_s=60)[0]
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        if name == "dp2":
            assert all(torch.equal(after[key], uninterrupted[key]) for key in saved)
        else:
            assert worst(after, uninterrupted) <= 1e-12
    _, cold = launch(resume, "dp2", folder, 1, False, ranks=2, timeout_s=60)[0]
    assert worst(cold, uninterrupted) > 1e-4


def load_broken(folder):
    engine = build("dp2")
    before = engine.state_dict()
    try:
        engine.load(folder)
    except CheckpointError as error:
        unchanged = all(torch.equal(before[key], value) for key, value in engine.state_dict().items())
        return str(error), unchanged
    return "loaded", False


@pytest.mark.parametrize("damage", ["missing", "corrupt", "short"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(tmp_path, damage):
    folder = tmp_path / "saved"
    launch(train_and_save, "dp2", str(folder), 1, ranks=2, timeout_s=60)
    victim = max((file for file in folder.rglob("*.distcp")), key=lambda file: file.stat().st_size)
    data = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif damage == "corrupt":
        data[len(data) // 2] ^= 0xFF
        victim.write_bytes(bytes(data))
    else:
        victim.write_bytes(bytes(data[:-10]))
    for message, unchanged in launch(load_broken, str(folder), ranks=2, timeout_s=60):
        assert victim.name in message and unchanged


def save_to_full_disk(folder):
    engine = build("dp2")
    engine.save(folder)

    def full(_):
        raise OSError(28, "No space left on device")

    if engine.rank == 1:
        os.fsync = full  # inside this rank's process only
    try:
        engine.save(folder)
    except CheckpointError as error:
        engine.load(folder)
        return str(error)
    return "saved"


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    for message in launch(save_to_full_disk, str(tmp_path / "run"), ranks=2, timeout_s=60):
        assert "failed on rank" in message and "No space left" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def export(folder):
    engine = build("cp2-ulysses", model="tiny:qwen3", dtype="float32")
    engine.forward_backward(make_samples(), Objective("importance_sampling"))
    engine.optim_step(AdamW(lr=1e-2))
    engine.export(folder)
    return engine.forward(make_samples())


def test_export_loads_in_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    outputs = launch(export, str(tmp_path / "hf"), ranks=2, timeout_s=60)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    untrained = Reference("tiny:qwen3", dtype=torch.float32)  # control: what was exported before the step
    for sample, out in zip(make_samples(), outputs, strict=True):
        logits = model(input_ids=sample.input_ids[None]).logits[0].log_softmax(-1)
        expected = logits.gather(-1, sample.target_ids[:, None])[:, 0] * sample.mask
        torch.testing.assert_close(out.logprob, expected.detach(), rtol=0, atol=1e-5)
        before = untrained.outputs(sample).logprob.detach()
        assert sample.num_trained == 0 or float((out.logprob - before).abs().max()) > 1e-3


def perturbed():
    engine = build("dp2")
    samples = make_samples(seed=engine.rank)
    try:
        engine.forward_backward(samples, Objective("importance_sampling"))
    except RankError as error:
        return str(error)
    return "ran"


def test_ranks_with_different_batches_are_named():
    """H7, O5: a difference is an error naming the rank within a step, not a hang."""
    for message in launch(perturbed, ranks=2, timeout_s=60):
        assert "rank 1" in message and "same samples" in message


GOOD = make_samples((5, 9))
WRONG_TYPES = (  # call, arguments, what the message says
    ("build", {"config": "tiny:qwen3"}, "config='tiny:qwen3' must be an EngineConfig. Write config=EngineConfig(...)."),
    ("forward_backward", {"samples": GOOD, "objective": "ppo"}, "objective='ppo' must be an Objective or a function"),
    ("forward_backward", {"samples": None, "objective": len}, "samples=None must be a sequence. Write samples=[...]."),
    ("forward_backward", {"samples": [*GOOD, 3], "objective": len}, "samples[2]=3 must be a Sample"),
    ("forward_backward", {"samples": GOOD, "objective": len, "normalise": None}, "normalise=None must be a string"),
    ("forward_backward", {"samples": GOOD, "objective": len, "denominator": "8"}, "denominator='8' must be a number, a mapping"),
    ("forward_backward", {"samples": GOOD}, "missing a required argument: 'objective'"),
    ("forward", {"samples": GOOD[0]}, "samples=Sample(L=5, t...old_logprob']) must be a sequence"),
    ("forward", {"samples": GOOD, "outputs": "logprob"}, "outputs='logprob' must be a sequence"),
    ("forward", {"samples": GOOD, "topk": "5"}, "topk='5' must be a whole number or None"),
    ("check", {"samples": (sample for sample in ())}, "must be a sequence"),
    ("optim_step", {"settings": 0.1}, "settings=0.1 must be an AdamW or an SGD. Write settings=AdamW(...)."),
    ("optim_step", {"settings": AdamW(lr=1.0), "adapter": 3}, "adapter=3 must be a string or None"),
    ("save", {"path": None}, "path=None must be a string or a path"),
    ("load", {"path": "/tmp", "optimizer": "no"}, "optimizer='no' must be True or False"),
    ("export", {"path": "/tmp", "merge": 1}, "merge=1 must be a string or None"),
)  # fmt: skip


def refusals():
    engine = build("cp2-ulysses")
    good = make_samples((5, 9))
    found = {}

    def attempt(name, call):
        try:
            call()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)

    objective = Objective("ppo")
    attempt("empty", lambda: engine.forward_backward([], objective))
    bad = Sample([200, 1], [1, 2], [1, 1], {"advantage": [0.0, 0.0], "old_logprob": [0.0, 0.0]})
    attempt("vocabulary", lambda: engine.forward_backward([*good, bad], objective))
    attempt("field", lambda: engine.forward_backward([*good, Sample([1], [2], [1])], objective))
    attempt("oversize", lambda: engine.forward_backward([*good, *make_samples((500,))], objective))
    attempt("output", lambda: engine.forward(good, outputs=("logits",)))
    attempt("normalise", lambda: engine.forward_backward(good, objective, normalise="mean"))
    attempt("value", lambda: engine.forward_backward(good, Objective("value")))
    attempt("step", lambda: engine.optim_step(AdamW(lr=1.0)))
    engine.forward_backward(good, objective)
    attempt("save", lambda: engine.save("/tmp/longspan-never-written"))
    attempt("load", lambda: engine.load("/tmp/longspan-no-such-folder"))
    for call, arguments, says in WRONG_TYPES:
        attempt(says, lambda call=call, arguments=arguments: getattr(engine, call)(**arguments))
    return found


def test_bad_input_is_refused_on_all_ranks_by_name():
    first, second = launch(refusals, ranks=2, timeout_s=60)
    expected = {
        "empty": "no samples", "vocabulary": "sample 2", "field": "sample 2", "oversize": "500", "output": "logits",
        "normalise": "mean", "value": "value_head", "step": "forward_backward", "save": "gradients", "load": "no checkpoint",
    }  # fmt: skip
    for found in (first, second):
        for name, part in expected.items():
            assert part in found[name], (name, found[name])
        for call, _, says in WRONG_TYPES:
            assert found[says].startswith(f"Engine.{call}: ") and says in found[says], found[says]
    assert not Path("/tmp/longspan-never-written").exists()


def wrong_layout():
    try:
        Engine.build(EngineConfig(model="tiny:qwen3", layout=Layout(dp=3)))
    except UserError as error:
        return str(error)
    return "built"


def test_a_layout_must_multiply_to_the_ranks():
    for message in launch(wrong_layout, ranks=2, timeout_s=60):
        assert "3 * 1 * 1 * 1 = 3" in message and "2" in message


def out_of_memory():
    engine = build("dp2")

    def full(step, program):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine.backend.policy.forward = full  # what the allocator does, on every rank
    try:
        engine.forward_backward(make_samples(), Objective("importance_sampling"))
    except OutOfMemory as error:
        return str(error)
    return "ran"


def test_out_of_memory_says_what_would_fit():
    for message in launch(out_of_memory, ranks=2, timeout_s=60):
        for part in ("forward_backward", "peak", "sample lengths", "max_tokens_per_rank", "recompute='full'"):
            assert part in message, (part, message)
