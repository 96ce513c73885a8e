"""A forward_backward that stops half-way leaves a part of its gradient: nothing goes on with it but clear_gradients() or load().

An image whose file is cut off has a size, so it is found only when its micro-step is made, after others have run backward.
"""

import re
from pathlib import Path
from time import perf_counter

import numpy as np
import PIL.Image
import pytest
import torch
import torch.distributed as dist

from longspan import SGD, Engine, EngineConfig, Image, Objective, Sample, launch
from longspan.engine.fsdp import backend as backend_module
from longspan.errors import LongspanError, UserError
from longspan.layout import parse_layout

IMAGE, START, END = 93, 95, 96  # ids of tiny:qwen3_vl


def sample(source):
    ids = torch.tensor([1, START, IMAGE, END, *range(2, 20)])
    length = len(ids) - 1
    mask = (torch.arange(length) > 3).float()
    return Sample(ids[:-1], ids[1:], mask, {"advantage": torch.ones(length)}, media=[Image(source)])


def write_images(folder: Path) -> tuple[str, str]:
    """A whole file, and one cut off behind its header."""
    whole, cut = folder / "whole.png", folder / "cut.png"
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(whole)
    cut.write_bytes(whole.read_bytes()[:60])
    return str(whole), str(cut)


def body(whole, cut, folder):
    layout = parse_layout(f"cp{dist.get_world_size()}-ring-contiguous")
    engine = Engine.build(EngineConfig("tiny:qwen3_vl", layout=layout, dtype="float64", max_tokens_per_rank=12))
    given, objective = [sample(whole), sample(whole)], Objective("reinforce")
    engine.forward_backward(given, objective)
    want = engine.gradients()
    engine.clear_gradients()
    said = []
    attempts = (
        lambda: engine.forward_backward([sample(whole), sample(cut)], objective),
        lambda: engine.forward_backward(given, objective),
        lambda: engine.optim_step(SGD(lr=0.1)),
        engine.gradients,
        lambda: engine.save(folder),
    )
    for attempt in attempts:
        with pytest.raises(UserError) as caught:
            attempt()
        said.append(str(caught.value))
    left = engine.backend.gradients()
    recovered = []
    for forgetful in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if forgetful:  # the fault: clear_gradients leaves what waits to be summed over ranks
                with pytest.raises(UserError):
                    engine.forward_backward([sample(whole), sample(cut)], objective)
                patch.setattr(backend_module, "drop_waiting", lambda policy: None)
            engine.clear_gradients()
        engine.forward_backward(given, objective)
        got = engine.gradients()
        engine.clear_gradients()
        recovered.append(all(torch.equal(got[k], want[k]) for k in want))
    return said, any(bool(value.any()) for value in left.values()), recovered


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_call_that_stops_half_way_is_never_stepped_with(tmp_path, ranks):
    results = launch(body, *write_images(tmp_path), tmp_path / "run", ranks=ranks, timeout_s=100)
    for (torn, *after, save), left, recovered in results:
        said = r"reading media failed on rank \d: .*cut\.png cannot be decoded.*Replace the file"
        assert re.search(said, torn) and "checkpoint" not in torn, torn
        assert left, "the first micro-step did add its gradient, or this test shows nothing"
        assert all("stopped half-way" in message and "clear_gradients()" in message for message in after), after
        assert "clear_gradients() first" in save
        assert recovered == [True, False]


def alone(picture, broken, missing):
    """What this rank is told where only rank 0's files are bad, or only the encoding rank meets them; the engine goes on after each."""
    layout = parse_layout(f"cp{dist.get_world_size()}-ring")
    engine = Engine.build(EngineConfig("tiny:qwen3_vl", layout=layout, dtype="float64", max_tokens_per_rank=64))
    objective, said = Objective("cross_entropy"), []
    good = sample(picture)
    for bad in (broken, missing if dist.get_rank() == 0 else picture):
        with pytest.raises(UserError) as caught:
            engine.forward_backward([sample(bad)], objective)
        said.append(str(caught.value))
        engine.clear_gradients()
        engine.forward_backward([good], objective)
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_hears_of_a_file_that_one_rank_cannot_read(tmp_path, ranks):
    picture, broken = tmp_path / "good.png", tmp_path / "exif.jpg"
    image = PIL.Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    image.save(picture)
    exif = PIL.Image.Exif()
    exif[274], exif[270] = 6, "hello there"
    image.save(broken, exif=exif)
    broken.write_bytes(broken.read_bytes().replace(b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02"))  # a number that is text
    told = launch(alone, str(picture), str(broken), str(tmp_path / "gone.png"), ranks=ranks, timeout_s=100)
    for rank, (first, second) in enumerate(told):
        assert re.search(r"reading media failed on rank 0: .*exif\.jpg cannot be decoded", first), (rank, first)
        assert "gone.png does not exist" in second and (rank == 0 or "rank 0 refuses this call" in second), second


def bad_calls(engine, last):
    """(call, what is wrong with it) of the last rank, where `last`; of the others calls in which nothing is wrong."""
    ids = list(range(5, 12))
    good = [Sample(ids, ids, [1] * 7, {"advantage": [0.5] * 7})]
    bare, objective = [Sample(ids, ids, [1] * 7)], Objective("reinforce")
    needy = Objective("reinforce", value=0.5) if last else objective
    trains = {
        "no field 'advantage'|lacks": lambda: engine.forward_backward(bare if last else good, objective),
        "the batch has no samples": lambda: engine.forward_backward([] if last else good, objective),
        "trains values": lambda: engine.forward_backward(good, needy),
        "are unknown": lambda: engine.forward(good, outputs=("loss",) if last else ("logprob",)),
        "needs EngineConfig": lambda: engine.forward(good, outputs=("value",) if last else ("logprob",)),
        "topk=3 goes with": lambda: engine.forward(good, topk=3 if last else None),
    }
    return good, objective, trains


def told(folder):
    """Of each bad call what this rank is told and in how many seconds; and whether the next good call is as ever."""
    ranks = dist.get_world_size()
    last = dist.get_rank() == ranks - 1
    engine = Engine.build(EngineConfig("tiny:qwen3", layout=parse_layout(f"dp{ranks}"), dtype="float64"))
    good, objective, calls = bad_calls(engine, last)
    engine.forward_backward(good, objective)
    want, found = engine.gradients(), []
    engine.clear_gradients()

    def attempt(call):
        start = perf_counter()
        with pytest.raises(LongspanError) as caught:
            call()
        found.append((str(caught.value), perf_counter() - start))

    for call in calls.values():
        attempt(call)
        engine.forward_backward(good, objective)
        assert all(torch.equal(value, want[name]) for name, value in engine.gradients().items())
        engine.clear_gradients()
    engine.forward_backward(good, objective)
    engine.torn = last  # as no call leaves it: on one rank alone
    attempt(lambda: engine.forward_backward(good, objective))
    attempt(lambda: engine.optim_step(SGD(lr=0.1)))
    engine.clear_gradients()
    engine.torn = last
    attempt(lambda: engine.save(folder))
    engine.clear_gradients()
    engine.forward_backward(good, objective)
    engine.optim_step(SGD(lr=0.1))
    engine.save(folder)
    return [*calls, *["stopped half-way"] * 2, "would lose the gradients"], found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_hears_of_a_call_that_one_rank_refuses(tmp_path, ranks):
    for rank, (wanted, found) in enumerate(launch(told, tmp_path / "run", ranks=ranks, timeout_s=60)):
        for part, (said, seconds) in zip(wanted, found, strict=True):
            assert re.search(part, said) and seconds < 10, (rank, part, said, seconds)
            assert (f"rank {ranks - 1}" in said) == (rank < ranks - 1), (rank, said)
