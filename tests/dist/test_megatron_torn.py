"""A call that stops half-way in a pipeline: after an image that is cut off the next call is right; after a failure on the way
between stages every rank is told that none can follow. Without the mend the next call waits for ever, so launches are timed."""

import importlib
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from megatron_cases import MODEL, installed, replaced

from longspan import SGD, Engine, EngineConfig, Image, Objective, Sample, launch
from longspan.engine.megatron.schedule import Move
from longspan.engine.program import Forward, Train
from longspan.errors import OutOfMemory, UserError
from longspan.layout import parse_layout

LENGTH, OBJECTIVE = 16, Objective("cross_entropy")


def build(model, name):
    return Engine.build(
        EngineConfig(
            model, layout=parse_layout(name), backend="megatron", dtype="float64", seed=0, max_tokens_per_rank=LENGTH
        )
    )


def pictured(engine, paths):
    """A sample an image, each a micro-step of its own."""
    draw, known, reader = np.random.default_rng(1), engine.adapter.ids, engine.adapter.reader
    made = []
    for path in paths:
        media = [Image(str(path))]
        (length,) = reader.run_lengths(reader.grid(media[0]))
        ids = draw.integers(5, 60, LENGTH)
        ids[: length + 2] = [known.start, *[known.image] * length, known.end]
        mask = torch.ones(LENGTH)
        mask[: length + 2] = 0
        made.append(Sample(torch.tensor(ids), torch.full((LENGTH,), 7), mask, media=media))
    return made


def texts():
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 60, (LENGTH,), generator=draw) for _ in range(4)]
    return [Sample(row, row.roll(-1), torch.ones(LENGTH)) for row in ids]


def answers(engine, samples):
    engine.clear_gradients()
    engine.forward_backward(samples, OBJECTIVE)
    gradients = engine.gradients()
    engine.clear_gradients()
    return gradients, torch.cat([out["logprob"] for out in engine.forward(samples)])


def cut_off(folder):
    """Answers before and after calls that stop at the third of four images, what those said, and a step with the rest."""
    engine = build("tiny:qwen3_vl", "pp2")
    good, bad = folder / "good.png", folder / "bad.png"
    whole, torn = (pictured(engine, paths) for paths in ([good] * 4, [good, good, bad, good]))
    before, said = answers(engine, whole), []
    for call in (lambda: engine.forward(torn), lambda: engine.forward_backward(torn, OBJECTIVE)):
        with pytest.raises(UserError, match=r"bad\.png") as caught:
            call()
        said.append(str(caught.value))
    with pytest.raises(UserError, match="stopped half-way"):
        engine.optim_step(SGD(lr=0.1))
    return before, answers(engine, whole), said


def stranded(folder):
    """What each rank is told after both ran out of memory, at different micro-steps."""
    engine = build("tiny:qwen3", "pp2")
    engine.save(folder / "saved")
    started = []

    def failing(real):
        def run(*args):
            started.append(args)
            if len(started) == 3 - engine.rank:
                raise MemoryError
            return real(*args)

        return run

    with replaced(MODEL + "Stage.forward", failing), pytest.raises(OutOfMemory):
        engine.forward_backward(texts(), OBJECTIVE)
    said = []
    for call in (engine.clear_gradients, lambda: engine.load(folder / "saved"), lambda: engine.forward(texts())):
        with pytest.raises(UserError) as caught:
            call()
        said.append(str(caught.value))
    with pytest.raises(UserError, match="stopped half-way"):
        engine.optim_step(SGD(lr=0.1))
    return said


def short_of_memory():
    """What a rank says whose receive, then whose sums after a backward, find no memory: 4 tokens, a stage by itself."""
    pipeline = importlib.import_module("longspan.engine.megatron.pipeline")  # where megatron-core is installed
    step = SimpleNamespace(
        shard=SimpleNamespace(lengths=[4], fields={"input_ids": torch.zeros(4)}, segment=torch.zeros(4)),
        context=SimpleNamespace(info=SimpleNamespace(size=1)),
    )
    links = SimpleNamespace(forwards_in=None, backwards_in=None, preceding=0, following=0)
    huge = SimpleNamespace(
        first=False, shape=SimpleNamespace(dtype=torch.float32), shape_between=lambda step: (1 << 50,)
    )
    with pytest.raises(OutOfMemory) as receiving:
        pipeline.Passage([huge], links, Forward).post(Move(0, 0, step))

    def after_backward():
        raise MemoryError

    passage = pipeline.Passage([SimpleNamespace(last=True)], links, Train)
    passage.steps[0], passage.flights[0, 0] = step, pipeline.Flight(None, torch.zeros(()), None)
    passage.post(Move(0, 0, None))
    with pytest.raises(OutOfMemory) as adding:
        passage.run(after_backward)
    return str(receiving.value), str(adding.value)


def body(folder):
    return cut_off(folder), stranded(folder), short_of_memory()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torn")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(folder / "good.png")
    data = (folder / "good.png").read_bytes()
    (folder / "bad.png").write_bytes(data[: len(data) // 2])
    return launch(body, folder, ranks=2, timeout_s=90)


@installed
def test_a_pipeline_goes_on_after_an_image_that_is_cut_off(two_ranks):
    for (gradients, logprobs), (again, logprobs_again), said in (found for found, *_ in two_ranks):
        assert torch.equal(logprobs, logprobs_again)
        assert gradients.keys() == again.keys()
        assert all(torch.equal(again[name], value) for name, value in gradients.items())
        assert any(bool(value.any()) for value in gradients.values())
        assert all("Replace the file or drop the sample" in message for message in said), said


@installed
def test_after_a_failure_between_stages_every_rank_is_refused(two_ranks):
    for _, said, _ in two_ranks:
        assert len(said) == 3
        assert all("pp=2" in message and "Start the run anew" in message for message in said), said


@installed
def test_memory_that_is_missing_around_a_move_is_explained(two_ranks):
    for _, _, (receiving, adding) in two_ranks:
        assert receiving.startswith("out of memory in forward: ") and "Set max_tokens_per_rank below 4" in receiving
        assert adding.startswith("out of memory in forward_backward: ")
