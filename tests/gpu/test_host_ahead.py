"""The host builds micro-steps while the GPU still works: no copy to the device waits for what was asked of it before, and each one
brings what its source held when it was asked for. Control: a source that is written to again while its copy waits."""

from importlib import import_module
from time import perf_counter

import pytest
import torch

from longspan import Engine, EngineConfig, Layout, Sample
from longspan.engine.batch import make_batch
from longspan.engine.steps import Keep
from longspan.launch import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
LENGTHS = (9000, 3000, 4000, 12000, 700, 15000)
BUSY = 3 * 10**9  # cycles that the GPU waits: 1.5 s at 2 GHz


def seconds(work):
    """Of the host until `work` returns, and until the GPU, busy before it, has done all; and what it returned."""
    torch.cuda.synchronize()
    start = perf_counter()
    torch.cuda._sleep(BUSY)
    kept = work()
    host = perf_counter() - start
    torch.cuda.synchronize()
    return host, perf_counter() - start, kept


def overwritten(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The fault: `sent`, whose pinned source is used again before the copy has run."""
    source = x.clone().pin_memory()
    there = source.to(device, non_blocking=True)
    source.zero_()
    return there


def same(steps, made) -> bool:
    """Whether every field of the micro-steps is that of their samples, of rows without pads."""
    for step in steps:
        fields = [torch.cat([made.tensors[n][name] for n in step.shard.samples], -1) for name in step.shard.fields]
        values = step.shard.fields.values()
        if not all(x.is_cuda and torch.equal(x.cpu(), y) for x, y in zip(values, fields, strict=True)):
            return False
    return all(torch.equal(step.shard.segment.cpu(), step.shard.info.segment) for step in steps)


def ahead(model: str):
    config = EngineConfig(model=model, layout=Layout(), dtype="float32", max_tokens_per_rank=16384)
    engine = Engine.build(config)
    draw = torch.Generator().manual_seed(0)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(0, 50, (length + 1,), generator=draw)
        samples.append(Sample(ids[:-1], ids[1:], torch.arange(length) % 3 > 0))
    made = make_batch(samples, engine.adapter, weights={}, fields=("temperature",), dtype=torch.float32)
    plan = engine.planner.plan(made)

    def build():
        return list(engine.builder.steps(made, plan, Keep()))

    assert same(build(), made)  # the first one also makes the pinned memory
    *busy, steps = seconds(build)
    right = same(steps, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("longspan.layout.shard"), "sent", overwritten)
        build()  # makes its pinned memory: taking it anew may wait for the GPU
        wrong = same(seconds(build)[2], made)
    pageable = torch.ones(2**22)
    waited = seconds(lambda: pageable.to("cuda", non_blocking=True))[:2]
    return len(plan.micro_steps), busy, waited, right, wrong


@pytest.mark.parametrize("model", ["tiny:qwen3", "tiny:qwen3_vl"])
def test_micro_steps_are_built_while_the_gpu_works(model):
    steps, (host, whole), (waited, until), right, wrong = launch(ahead, model, ranks=1, timeout_s=200, device="cuda")[0]
    assert steps >= 3 and whole > 0.5
    assert host < whole / 4, f"the host took {host:.3f} s of {whole:.3f} s"
    assert waited > until / 2, "the control: a copy from pageable memory waits for the GPU"
    assert right, "a copy brought something else than its source held"
    assert not wrong, "the control: sources written to again while their copies wait"
