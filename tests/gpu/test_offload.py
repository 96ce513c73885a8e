"""Host offload and tiled MLPs on a GPU: streams, pinned blocks and prefetch change no number.

fp64 to 1e-12 relative L2 against the same run without them (order of atomic sums only); tests/dist/test_offload.py holds the CPU
path bit for bit. Rows are long enough that copies are still running when the next layer starts; each run is made twice, so
that blocks are used again. Control: a fetch that does not wait for its copy is seen.
"""

import pytest
import torch
from torch import Tensor

from longspan import AdamW, Engine, EngineConfig, Objective, Sample
from longspan.engine.fsdp import host, host_optimizer
from longspan.engine.fsdp.host import HostLink

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = (3000, 1, 1095)
TOLERANCE = 1e-12
WAYS = [
    {"offload": ("checkpoints",), "recompute": "full"},
    {"offload": ("checkpoints",), "recompute": "selective"},
    {"offload": ("optimizer",)},
    {"offload": ("checkpoints", "parameters"), "recompute": "full"},
    {"mlp_tile": 512, "recompute": "full"},
    {"mlp_tile": 512, "recompute": "full", "offload": ("checkpoints", "optimizer")},
]


def run(**settings: object) -> dict[str, Tensor]:
    """Gradients of two steps and the weights after them."""
    draw, samples = torch.Generator().manual_seed(0), []
    for length in LENGTHS:
        ids = torch.randint(0, 90, (length + 1,), generator=draw)
        fields = {"advantage": torch.randn(length, generator=draw), "old_logprob": -4 * torch.ones(length)}
        samples.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields=fields))
    base = {"model": "tiny:qwen3", "dtype": "float64", "max_tokens_per_rank": 3100}
    engine, seen = Engine.build(EngineConfig(**{**base, **settings})), {}
    for step in range(2):
        engine.forward_backward(samples, Objective("ppo", clip=0.2))
        seen |= {f"{step} {name}": gradient for name, gradient in engine.gradients().items()}
        engine.optim_step(AdamW(lr=1e-3, clip_norm=1.0))
    return seen | engine.state_dict()


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(found) == set(expected)
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-30)) for n in expected)


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return run()


@pytest.mark.parametrize("settings", WAYS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_offload_and_tiles_change_no_number(
    settings: dict[str, object], plain: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "BLOCK", 100_000)
    monkeypatch.setattr(host_optimizer, "BUCKET", 20_000)
    assert distance(run(**settings), plain) < TOLERANCE


def test_a_fetch_that_does_not_wait_is_seen(plain: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def late(
        self: HostLink, pairs: object
    ) -> torch.cuda.Event:  # the copies stand behind 50 ms of other work in the stream
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10**8)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    monkeypatch.setattr(HostLink, "copy", late)
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    found = run(offload=("checkpoints",), recompute="full")
    assert not distance(found, plain) < TOLERANCE
