"""Gradients summed over ranks once a call: every parameter against the oracle (plain HF, one unpacked sample, fp64) over three and more
micro-steps, two calls against one, calls that stop half-way; and how often ranks really meet.

Faults, each of which must show: gradients that wait are dropped between micro-steps; the vision tower waits too and is never
summed; clear_gradients leaves what a torn call left; layers stay gathered after a call without backward, or as a teacher's.
"""

import dataclasses
import logging
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from swap import replaced

from longspan import AdamW, Engine, EngineConfig, Objective, launch
from longspan.data.memory import CONTEXT_GIB, GIB, ROOM
from longspan.engine import engine as engine_module
from longspan.engine import planning as planning_module
from longspan.engine import reductions as reductions_module
from longspan.engine.fsdp import backend as backend_module
from longspan.engine.fsdp.waiting import drop_waiting
from longspan.engine.memory import used_gib
from longspan.engine.optim import SGD, local
from longspan.engine.reductions import Traffic
from longspan.launch import world
from longspan.layout import parse_layout
from longspan.parity import Reference
from longspan.parity.cases import PPO, Case
from longspan.parity.differences import parameters
from longspan.parity.samples import default_samples, fill_fields

LENGTHS = (13, 1, 40, 7, 29, 3, 37, 22, 35, 2, 31)
CASE = Case("ppo", "ppo", {**PPO, "entropy": 0.01}, "constant", 60.0)
LIMIT, ZERO = 1e-12, 1e-9
# what FSDP calls: torch 2.13, torch 2.11
NEW = hasattr(dist, "reduce_scatter_single")
SUM, GATHER = (
    ("reduce_scatter_single", "all_gather_single") if NEW else ("reduce_scatter_tensor", "all_gather_into_tensor")
)
TEXT, IMAGES, EXPERTS = "tiny:qwen3", "tiny:qwen3_vl", "tiny:qwen3_moe"


class Sums:
    """Counts sums and gathers, and keeps of every micro-step whether it had media and whether gradients were summed after it."""

    def __init__(self) -> None:
        self.count, self.gathers, self.steps = 0, 0, []
        self.sum, self.gather, self.marked = getattr(dist, SUM), getattr(dist, GATHER), engine_module.marked

    def reduce_scatter(self, *args, **kwargs):
        self.count += 1
        return self.sum(*args, **kwargs)

    def all_gather(self, *args, **kwargs):
        self.gathers += 1
        return self.gather(*args, **kwargs)

    def mark(self, *args):
        for step in self.marked(*args):
            self.steps.append((step.media is not None, step.reduces))
            yield step

    @contextmanager
    def counted(self):
        with (
            replaced(dist, SUM, self.reduce_scatter),
            replaced(dist, GATHER, self.all_gather),
            replaced(engine_module, "marked", self.mark),
        ):
            yield


def build(model, layout, **settings):
    defaults = {"dtype": "float64", "max_tokens_per_rank": 40}
    return Engine.build(EngineConfig(model, layout=parse_layout(layout), **(defaults | settings)))


def train(engine, *calls):
    for samples in calls:
        told = engine.forward_backward(samples, CASE.objective(), CASE.normalise, CASE.denominator)
    return told


def dropped(engine):
    """A fault: what waits is forgotten between micro-steps."""
    real = backend_module.reduce_after
    return replaced(
        backend_module,
        "reduce_after",
        lambda units, reduces: (drop_waiting(engine.backend.policy), real(units, reduces)),
    )


def unsynced_tower(engine):
    """A fault: the blocks of the tower wait like the rest, and nothing sums them."""
    real, tower = backend_module.reduce_after, engine.adapter.model.model.visual.blocks

    def reduce_after(units, reduces):
        real(units, reduces)
        for block in tower:
            block.set_requires_gradient_sync(False, recurse=False)

    return replaced(backend_module, "reduce_after", reduce_after)


def against_oracle(model, layout, samples, **settings):
    """Once a call, two calls, and a fault: gradients, metrics, sums and micro-steps of each."""
    engine, found = build(model, layout, **settings), {}
    fault = unsynced_tower if model == IMAGES else dropped
    for name, calls in (("one", [samples]), ("two", [samples[:1] + samples[2:], samples[1:2]]), ("fault", [samples])):
        engine.clear_gradients()
        sums = Sums()
        silenced = replaced(backend_module, "has_waiting", lambda policy: False)
        with sums.counted():
            if name == "fault":
                with silenced, fault(engine):
                    told = train(engine, *calls)
            else:
                told = train(engine, *calls)
        found[name] = (engine.gradients(), told, sums.count, sums.steps)
    return found


def several(jobs):
    return [against_oracle(model, layout, samples, **settings) for model, layout, samples, settings in jobs]


def given(model, lengths=LENGTHS, **settings):
    reference = Reference(model, dtype=torch.float64, **settings)
    samples = fill_fields(default_samples(reference, lengths), reference)
    return samples, reference.run(samples, CASE).gradients


def held(found, want):
    for name in ("one", "two"):
        gradients, told = found[name][:2]
        error, where = parameters(gradients, want, ZERO)
        assert error <= LIMIT, (name, where, error)
        assert told["plan/reductions"] == 1
    sums = [reduces for _, reduces in found["one"][3]]
    assert len(sums) >= 3 and sums == [False] * (len(sums) - 1) + [True]
    assert parameters(found["fault"][0], want, ZERO)[0] > 1e-3, "the fault must show"


def test_gradients_are_the_oracles_on_two_ranks():
    text, want = given(TEXT, value_head=True)
    seeing, wanted = given(IMAGES, (20, 70, 30, 80, 20, 9))
    experts, expected = given(EXPERTS)
    jobs = [
        (TEXT, "dp2", text, {"value_head": True}),
        (TEXT, "cp2-ring", text, {"value_head": True, "max_tokens_per_rank": 22, "offload": ("parameters",)}),
        (TEXT, "dp2", text, {"value_head": True, "max_tokens_per_rank": 24, "dynamic_cp": True}),
        (IMAGES, "cp2-ulysses", seeing, {"max_tokens_per_rank": 42}),
        (EXPERTS, "dp2-ep2", experts, {}),
    ]
    found = launch(several, jobs, ranks=2, timeout_s=120)[0]
    for each, right in zip(found, (want, want, want, wanted, expected), strict=True):
        held(each, right)
    assert found[0]["one"][2] == 3, "two layers and the root, once"
    assert found[0]["two"][2] == 2 * 3, "once a call"
    media = [sees for sees, _ in found[3]["one"][3]]
    assert any(media) and not media[-1], "the last micro-step has no image, or this shows nothing"
    lost = [name for name, value in found[3]["fault"][0].items() if not value.any() and wanted[name].any()]
    assert lost and all(".visual.blocks." in name for name in lost), "the tower alone is lost"


def test_gradients_are_the_oracles_on_three_ranks():
    text, want = given(TEXT)
    held(launch(several, [(TEXT, "cp3-ring", text, {"max_tokens_per_rank": 16})], ranks=3, timeout_s=120)[0][0], want)


def frozen(samples):
    """Only the tower and its merger train: a micro-step without images has no backward."""
    engine = build(IMAGES, "cp2-ulysses", max_tokens_per_rank=42, freeze=("language", "embeddings"))
    sums = Sums()
    with sums.counted():
        told = train(engine, samples)
    return engine.gradients(), told["plan/reductions"], sums.steps


def test_nothing_waits_where_the_last_micro_step_may_have_no_backward():
    samples, want = given(IMAGES, (20, 70, 30, 80, 20, 9))
    gradients, number, steps = launch(frozen, samples, ranks=2, timeout_s=60)[0]
    assert number == 0 and not steps[-1][0]
    trained = {name: want[name] for name in gradients}
    assert parameters(gradients, trained, ZERO)[0] <= LIMIT and all(".visual." in name for name in trained)


class Planted(RuntimeError):
    """Stands for an allocator that has no more memory."""


@contextmanager
def failing(engine, sums):
    """The second micro-step fails in backward, below the last layer: some units have gradients that wait, some do not."""

    def fail(grad):
        raise Planted

    def hook(layer, args, out):
        if len(sums.steps) == 2:
            (out if isinstance(out, torch.Tensor) else out[0]).register_hook(fail)

    handle = engine.adapter.units()[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def torn(engine, samples):
    sums = Sums()
    with sums.counted(), failing(engine, sums), pytest.raises(Planted):
        train(engine, samples)
    assert engine.torn and engine.backend.has_gradients() and len(sums.steps) == 2


def recovers(samples, folder):
    """Gradients of a right call after a torn one: cleared, loaded, and cleared with the fault."""
    engine, found = build(TEXT, "dp2"), {}
    engine.save(folder)
    forget = {"clear": engine.clear_gradients, "load": lambda: engine.load(folder), "fault": engine.clear_gradients}
    for name, clear in forget.items():
        torn(engine, samples)
        fault = replaced(backend_module, "drop_waiting", lambda policy: None)
        with fault if name == "fault" else nullcontext():
            clear()
            assert engine.backend.has_gradients() == (name == "fault")
        train(engine, samples)
        found[name] = engine.gradients()
        engine.clear_gradients()
    return found


def test_what_a_torn_call_left_is_dropped(tmp_path):
    samples, want = given(TEXT)
    found = launch(recovers, samples, tmp_path / "saved", ranks=2, timeout_s=60)[0]
    assert parameters(found["clear"], want, ZERO)[0] <= LIMIT
    assert parameters(found["load"], want, ZERO)[0] <= LIMIT
    assert parameters(found["fault"], want, ZERO)[0] > 1e-3, "the fault must show"


CONFIGS = {
    "a": LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "b": LoraConfig(r=2, target_modules=["v_proj"]),
}


def sizes(engine, samples):
    """GiB of whole gradients, of gathered layers, and at the peak of a micro-step."""
    held, peak = engine.backend.held(), engine.planner.memory_of(0.0).peak(max(map(len, samples)))
    return held.gradients / GIB, held.layers / GIB, peak / GIB


def chosen(samples):
    """Each choice in turn, as GPUs of such memory would make it: gradients, metrics, sums and gathers; and what was logged."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("longspan.plan")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    adapters = [dataclasses.replace(each, adapter="ab"[number % 2]) for number, each in enumerate(samples)]
    found = []
    for given_samples, settings in ((samples, {"dtype": "bfloat16"}), (adapters, {"lora": CONFIGS})):
        engine, each = build(TEXT, "dp2", **settings), []
        gradients, weights, peak = sizes(engine, samples)
        for spare in (
            None,
            0.9 * min(gradients, weights),
            1.1 * gradients,
            gradients + 1.1 * weights,
        ):  # None: no limit is known
            engine.planner.room_gib = None if spare is None else (peak + spare + CONTEXT_GIB) / ROOM
            sums = Sums()
            with sums.counted():
                told = train(engine, given_samples)
            each.append((engine.gradients(), told, sums.count, sums.gathers))
            engine.clear_gradients()
        found.append(each)
    return found, said


def test_the_planner_chooses_by_memory_and_says_so():
    samples, _ = given(TEXT)
    (found, said), (_, other) = launch(chosen, samples, ranks=2, timeout_s=60)
    for each in found:
        steps = each[0][1]["plan/micro_steps"]
        assert steps >= 3
        assert [told["plan/reductions"] for _, told, _, _ in each] == [1, steps, 1, 1]
        assert [told["plan/gathers"] for _, told, _, _ in each] == [2, 2, 2, 1]
        assert [count for _, _, count, _ in each] == [each[0][2] * n for n in (1, steps, 1, 1)]
        assert each[3][3] == 3 * steps < each[2][3], "two layers and the root, once a micro-step"
        for gradients, *_ in each[1:]:
            assert parameters(gradients, each[0][0], ZERO)[0] < 1e-6, "all add up in fp32: the order differs"
    sums, weights = "gradients are summed over ranks ", "weights of decoder layers "
    assert [text.partition(":")[0] for text in said] == [
        sums + "once a call",
        sums + "after every micro-step",
        weights + "are gathered again for backward",
        weights + "stay gathered until backward",
    ] * 2
    assert "do not fit beside the largest micro-step" in said[1] and not other, "rank 0 speaks for all"


@contextmanager
def still_gathered(engine_keeps, lets_go):
    """Faults: layers stay gathered without backward too; and nothing lets them go where parameters are read."""
    real = backend_module.keep_gathered
    with ExitStack() as stack:
        if engine_keeps:
            kept = replaced(backend_module, "keep_gathered", lambda units, stays: real(units, True))
            stack.enter_context(kept)
        if not lets_go:
            stack.enter_context(replaced(backend_module, "let_go", lambda policy: None))
        yield


# room, and the faults: either of two things keeps a step right, and both at once must show
GATHERED = {
    "twice": (None, False, True),
    "once": (80.0, False, True),
    "let go after forward": (80.0, False, False),
    "let go before step": (80.0, True, True),
    "fault": (80.0, True, False),
}


def stepped(samples):
    """Log-probs after two steps, by name of GATHERED."""
    found = {}
    for name, (room_gib, keeps, lets_go) in GATHERED.items():
        engine = build(TEXT, "dp2")
        engine.planner.room_gib = room_gib
        train(engine, samples)
        engine.optim_step(AdamW(lr=0.01))
        train(engine, samples)
        with still_gathered(keeps, lets_go):
            engine.forward(samples)
            engine.optim_step(AdamW(lr=0.01))
            found[name] = torch.cat([out["logprob"] for out in engine.forward(samples)])
    return found


def test_a_step_reaches_weights_that_stayed_gathered():
    samples, _ = given(TEXT)
    found = launch(stepped, samples, ranks=2, timeout_s=60)[0]
    gaps = {name: float((found[name] - found["twice"]).abs().max()) for name in GATHERED}
    assert gaps.pop("fault") > 1e-3, "the fault must show"
    assert not any(gaps.values()), gaps


def taught(samples, folder):
    """A teacher that trains too, by name of GATHERED: its norm, gradients and weights, and those of its checkpoint."""
    found = {}
    for name, (room_gib, keeps, lets_go) in GATHERED.items():
        teacher, student = (build(TEXT, "dp2", dtype="bfloat16", seed=seed) for seed in (0, 1))
        teacher.planner.room_gib = student.planner.room_gib = room_gib
        train(teacher, samples)
        teacher.optim_step(SGD(lr=0.1))
        told = train(teacher, samples)
        assert told["plan/gathers"] == (2 if room_gib is None else 1)
        with still_gathered(keeps, lets_go):
            student.forward_backward(samples, Objective("distill_full"), teacher=teacher)
            gradients = teacher.gradients()
            norm = teacher.optim_step(SGD(lr=0.1))["grad/norm"]
            weights = teacher.state_dict()
            if name != "fault":
                teacher.save(folder / name)
        if name != "fault":
            student.load(folder / name)
        found[name] = norm, gradients, weights, student.state_dict()
    return found


def test_a_teacher_lets_its_layers_go(tmp_path):
    samples, _ = given(TEXT)
    found = launch(taught, samples, tmp_path, ranks=2, timeout_s=120)[0]
    norm, gradients, weights, _ = found["twice"]
    other_norm, other, left, _ = found.pop("fault")
    assert abs(other_norm - norm) > 0.1 * norm and other.keys() == gradients.keys(), "the fault must show"
    assert {value.dtype for value in left.values()} != {torch.float32}, "the fault must show"
    for name, (its_norm, its_gradients, *its_weights) in found.items():
        assert its_norm == norm, name
        assert all(torch.equal(its_gradients[key], value) for key, value in gradients.items()), name
        for each in its_weights:
            assert all(torch.equal(each[key], value) for key, value in weights.items()), name


def crowded(samples):
    """Others on the device of rank 1 alone: what each rank would choose by itself, and what they do; bytes of this engine."""
    with replaced(planning_module, "device_gib", lambda device: 80.0 + world().rank):
        engine = build(TEXT, "dp2", dtype="bfloat16", max_tokens_per_rank="auto")
    known, budget = engine.planner.room_gib, engine.planner.limits([40]).budget
    engine = build(TEXT, "dp2", dtype="bfloat16")
    chooser, (gradients, _, peak) = engine.reductions, sizes(engine, samples)
    engine.planner.room_gib = (peak + 3 + 1.1 * gradients + CONTEXT_GIB) / ROOM
    alone, found, own = [], [], [engine.backend.held().own]
    traffic = chooser.traffic

    def noted(plan, rooms):
        alone.append(traffic(plan, [rooms[world().rank]]))
        return traffic(plan, rooms)

    for gib in (0.0, 2.5, 3.5):
        used = CONTEXT_GIB + gib * world().rank
        with (
            replaced(reductions_module, "used_gib", lambda device, used=used: used + engine.backend.held().own / GIB),
            replaced(chooser, "traffic", noted),
        ):
            told = train(engine, samples)
        found.append((told["plan/reductions"], told["plan/gathers"]))
    own.append(engine.backend.held().own)
    engine.optim_step(AdamW(lr=0.01))
    own.append(engine.backend.held().own)
    shards = sum(local(parameter).nbytes for _, parameter in engine.backend.named_parameters())
    return known, budget, alone, found, told["plan/micro_steps"], [each / shards for each in own]


def test_the_fullest_device_decides_for_all_ranks():
    samples, _ = given(TEXT)
    one, two = launch(crowded, samples, ranks=2, timeout_s=60)
    assert one[0] == two[0] == 80 and one[1] == two[1], "GPUs of 80 and 81 GiB"
    steps = one[4]
    assert steps >= 3
    assert one[2] == [Traffic(1, 1)] * 3 and two[2] == [Traffic(1, 1), Traffic(1, 2), Traffic(steps, 2)]
    assert one[3] == two[3] == [(1, 1), (1, 2), (steps, 2)], "alone they would part, and hang"
    assert one[5] == pytest.approx([1, 2, 3], rel=1e-2), "weights; their gradients; two moments and no gradients"


def test_what_a_gpu_holds_is_counted_in_and_outside_the_allocator():
    device, says = torch.device("cuda", 0), {"memory_reserved": 30 * GIB, "memory_allocated": 22 * GIB}
    with ExitStack() as stack:
        for name, value in says.items():
            stack.enter_context(replaced(torch.cuda, name, lambda device, value=value: value))
        stack.enter_context(replaced(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB)))
        assert used_gib(device) == 80 - 40 - 8
    assert used_gib(torch.device("cpu")) == 0
