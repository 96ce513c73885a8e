"""The engine's own promises on several ranks: calls add, checkpoints load under any layout, every rank must pass the same batch.

Numbers are held to the oracle (plain Hugging Face, one unpacked sample at a time); an engine is compared with itself only where
the claim is bit for bit: loaded weights, a run that goes on. Each comparison has a fault that it must see.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from ragged import RULE, SHORT, ragged, train, truth, worst

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
from longspan.parity import Reference, differences
from longspan.parity.cases import Case
from longspan.parity.faults import planted


def build(name="dp1", **settings):
    defaults = {"model": "tiny:qwen3", "dtype": "float64", "max_tokens_per_rank": 48}
    return Engine.build(EngineConfig(layout=parse_layout(name), **(defaults | settings)))


CASE = Case("is", "importance_sampling", {"entropy": 0.01}, **RULE)


def calls_add(name, lost):
    engine, samples = build(name), ragged()
    for part in (
        samples[:1],
        [samples[SHORT]],
        samples[2:5],
        samples[5:],
    ):  # the last call has all-zero weights (bug A2)
        if lost:
            engine.clear_gradients()
        engine.forward_backward(part, CASE.objective(), **RULE)
        engine.forward(part)  # a forward in between changes nothing
    return engine.gradients()


@pytest.mark.parametrize("name", ["dp1", "cp3-ring", "dp2-cp2"])
def test_calls_add(name):
    wanted = truth("tiny:qwen3", ragged(), CASE).gradients
    for found in launch(calls_add, name, False, ranks=parse_layout(name).ranks, timeout_s=60):
        assert worst(found, wanted) <= 1e-12


def test_a_lost_call_is_seen():
    """The planted fault: each call drops the gradients of the ones before."""
    found = launch(calls_add, "dp1", True, ranks=1, timeout_s=60)[0]
    assert worst(found, truth("tiny:qwen3", ragged(), CASE).gradients) > 1e-2


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


GSPO = Case("gspo", "gspo", {"clip": 0.2, "entropy": 0.01})


def dynamic(name, fault=None):
    with planted(fault):
        engine = build(name, dynamic_cp=True, max_tokens_per_rank=80)
        engine.planner.plan = lambda batch: MIXED
        metrics = engine.forward_backward(ragged(lengths=LENGTHS), GSPO.objective())
    return metrics, engine.gradients()


@pytest.mark.parametrize("name", ["cp4-ring", "cp4-gather"])
def test_dynamic_cp_is_exact(name):
    wanted = truth("tiny:qwen3", ragged(lengths=LENGTHS), GSPO)
    for metrics, gradients in launch(dynamic, name, ranks=4, timeout_s=60):
        assert worst(gradients, wanted.gradients) <= 1e-12
        assert differences.metrics(metrics, wanted.metrics)[0] <= 1e-9


def test_a_sequence_ratio_of_one_rank_is_seen():
    """The planted fault of the test above: gspo's mean over a rank's own tokens, where rows have other sizes."""
    _, gradients = launch(dynamic, "cp4-ring", "gspo-local", ranks=4, timeout_s=60)[0]
    assert worst(gradients, truth("tiny:qwen3", ragged(lengths=LENGTHS), GSPO).gradients) > 1e-4


STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "clip_norm": 1.0}


def step(engine, number):
    train(engine, ragged(number), CASE)
    engine.optim_step(AdamW(**STEP))


def train_and_save(name, folder, steps):
    engine = build(name)
    for number in range(steps):
        step(engine, number)
    engine.save(folder)
    return engine.state_dict()


def resume(name, folder, optimizer):
    engine = build(name, seed=5)  # other weights until loaded
    engine.load(folder, optimizer=optimizer)
    loaded = engine.state_dict()
    step(engine, 2)
    return loaded, engine.state_dict()


def test_checkpoints_load_under_any_layout(tmp_path):
    """K7, K13: weights bit for bit anywhere; a continued run bit for bit under the same layout; moments matter."""
    folder = str(tmp_path / "two")
    saved = launch(train_and_save, "dp2", folder, 2, ranks=2, timeout_s=60)[0]
    uninterrupted = launch(train_and_save, "dp2", str(tmp_path / "three"), 3, ranks=2, timeout_s=60)[0]
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    for number in range(3):
        reference.run(ragged(number), CASE)
        reference.adamw(**STEP)
    for name in ("dp2", "cp3-ring", "dp1"):
        loaded, after = launch(resume, name, folder, True, ranks=parse_layout(name).ranks, timeout_s=60)[0]
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        assert worst(after, reference.weights()) <= 1e-10
        if name == "dp2":
            assert all(torch.equal(after[key], uninterrupted[key]) for key in saved)
    _, cold = launch(resume, "dp2", folder, False, ranks=2, timeout_s=60)[0]
    assert worst(cold, reference.weights()) > 1e-4


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
    engine.forward_backward(ragged(), Objective("importance_sampling"))
    engine.optim_step(AdamW(lr=1e-2))
    engine.export(folder)
    return engine.forward(ragged(tempered=False))


def test_export_loads_in_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    outputs = launch(export, str(tmp_path / "hf"), ranks=2, timeout_s=60)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    untrained = Reference("tiny:qwen3", dtype=torch.float32)  # control: what was exported before the step
    for sample, out in zip(ragged(tempered=False), outputs, strict=True):
        logits = model(input_ids=sample.input_ids[None]).logits[0].log_softmax(-1)
        expected = logits.gather(-1, sample.target_ids[:, None])[:, 0] * sample.mask
        torch.testing.assert_close(out.logprob, expected.detach(), rtol=0, atol=1e-5)
        before = untrained.outputs(sample).logprob.detach()
        assert sample.num_trained == 0 or float((out.logprob - before).abs().max()) > 1e-3


def perturbed():
    """What each call says where rank 1 asks for something else, and whether no weight moved."""
    engine = build("dp2")
    rank, good = engine.rank, ragged()
    started, found = engine.state_dict(), {}

    def attempt(name, call):
        try:
            call()
            found[name] = "ran"
        except RankError as error:
            found[name] = str(error)

    attempt("batch", lambda: engine.forward_backward(ragged(rank), Objective("importance_sampling")))
    attempt("objective", lambda: engine.forward_backward(good, Objective("ppo", clip=(0.2, 0.3)[rank])))
    attempt("outputs", lambda: engine.forward(good, ("logprob", "entropy")[: 2 - rank]))
    engine.forward_backward(good, Objective("ppo"))
    attempt("lr", lambda: engine.optim_step(AdamW(lr=(1e-3, 1e-1)[rank])))
    attempt("clip_norm", lambda: engine.optim_step(AdamW(lr=1e-3, clip_norm=(None, 1.0)[rank])))
    return found, all(torch.equal(started[name], value) for name, value in engine.state_dict().items())


def test_ranks_with_different_batches_or_settings_are_named():
    """H7, O5: a difference is an error naming the rank within a step, not a hang or ranks that go different ways."""
    says = {
        "batch": "same samples",
        "objective": "0.3",
        "outputs": "entropy",
        "lr": "0.1",
        "clip_norm": "clip_norm=1.0",
    }
    for found, unmoved in launch(perturbed, ranks=2, timeout_s=60):
        assert unmoved
        for name, message in found.items():
            assert (
                "rank 1" in message and says[name] in message and "must pass the same" in message.replace("\n", " ")
            ), (name, message)


GOOD = ragged(lengths=(5, 9))
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
    good = ragged(lengths=(5, 9))
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
    attempt("oversize", lambda: engine.forward_backward([*good, *ragged(lengths=(500,))], objective))
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
        engine.forward_backward(ragged(), Objective("importance_sampling"))
    except OutOfMemory as error:
        return str(error)
    return "ran"


def test_out_of_memory_says_what_would_fit():
    for message in launch(out_of_memory, ranks=2, timeout_s=60):
        for part in ("forward_backward", "peak", "sample lengths", "max_tokens_per_rank", "recompute='full'"):
            assert part in message, (part, message)
