"""Policy gradients on recorded trajectories with models that outgrow one GPU, on the megatron backend.

    longspan train recipes/large.py:images_9b --data FILE     # Qwen3.5-9B, images and short answers, 8 GPUs
    longspan train recipes/large.py:agents_35b --data FILE    # Qwen3.5-35B-A3B, agent rows up to 64k tokens, 16 GPUs
    longspan train recipes/large.py:images_9b_dry             # the same layouts on tiny random models, on CPUs:
    longspan train recipes/large.py:agents_35b_dry            # 4 and 16 processes, no data needed

FILE holds one rollout a line (src/longspan/data/jsonl.py): ids, shifted targets, a mask of the sampled tokens,
`advantage` and the sampler's `old_logprob`, images as paths. More hosts: start the same command under torchrun.

Why these layouts (docs/megatron.md has the arithmetic):
- tp=2 halves every matrix, weight and gradient of a rank; sequence_parallel=True also halves norms and the residual
  stream. 2 is what the 2 key-value heads of 35B-A3B allow (9B has 4), and tp crosses NVLink in every layer: no more than needed.
- cp=2 shares a row's tokens, so max_tokens_per_rank is half of the longest packed row. DeltaNet layers need token order:
  index="contiguous", linear="state" (a rank passes its state on; heads would move every token). mixer="ulysses" for the
  softmax layers: 8 query heads a rank divide by cp, and it moves least.
- ep=8 (35B-A3B) puts 32 of 256 experts on a rank: 4 B parameters of 32 B. Experts spread over dp * cp ranks, so dp=4.
- dp: what is left. Optimizer moments are cut over dp * cp.
- dtype="bfloat16": fp32 masters, gradients summed in fp32 after each micro-step.
- recompute="selective" keeps attention's outputs; "full" keeps layer inputs only (64k rows).
- freeze: agent rows are text, so the tower is left alone; geometry trains it.
- loss: ppo with clip 0.2 / 0.28 on the sampler's log-probs, over tokens of the whole batch (normalise="token");
  moe_aux is per layer and per sample, 0.001 as the model was trained.

What `longspan plan` says of these layouts on H200s, a step of 64 rows (lengths, shares and budgets as below; its constants are the
fsdp backend's, compiled; this backend runs eager, 1.25 to 1.5 times as long on two H200s, docs/planning.md):
- images_9b: fits, 74 GiB at the peak, 54 of them weights, gradients and moments; 2.3 s, 6 % idle. recompute="none" fits too: 101 GiB,
  1.9 s. On these GPUs --engine.backend fsdp with dp=4, cp=2, tp=1 is faster, 1.8 s at 31 GiB (1.4 s without recomputation): tp=2
  is for smaller GPUs and for what FSDP cannot cut.
- agents_35b: fits, 111 GiB at the peak, which is the optimizer step; 42 s, most of it the experts' exchange: ep=8 with tp=2 between
  its ranks reaches over 16 GPUs, two nodes. --engine.layout.ep 4 --engine.layout.etp 2 keeps it inside a node: 17 s, 87 GiB. fsdp with dp=8,
  cp=2: 10 s, 60 GiB.

    python -c "import transformers as t; c = t.Qwen3_5Config(architectures=['Qwen3_5ForConditionalGeneration']); c.save_pretrained('9b')"
    longspan plan --model 9b --lengths 1500/12288 --visual-share 0.4 --trained-share 0.5 --layouts dp2-cp2-tp2-sp,dp4-cp2 \\
        --max-tokens-per-rank 6144
    longspan plan --model 35b --lengths 24000/65536 --freeze vision --layouts dp4-cp2-tp2-ep8-sp,dp4-cp2-tp2-ep4-etp2-sp,dp8-cp2 \\
        --max-tokens-per-rank 32768 --recompute full

Expect of a dry run: the numbers of one rank on the fsdp backend, loss and gradient norm to 1e-8 (fp64; tests/e2e/test_large.py).
agents_35b_dry on 16 processes: loss/ppo -0.205047643 and 0.260494043, grad/norm 16.244778736 and 10.391541260, as on one.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from longspan import AdamW, Engine, EngineConfig, Image, Layout, Sample, UserError
from longspan.data.jsonl import read_jsonl
from longspan.models.loading import build_random
from longspan.models.tiny import tiny
from longspan.rl import Loss, Run, RunConfig, Schedule, Supervised, publish_folder, supervised_rows

IMAGE, START, END, TEXT = 93, 95, 96, 90  # ids of the tiny models: placeholder, around it, and how many are text
CELL = 8  # pixels a visual token of the tiny tower is high and wide


@dataclass(frozen=True)
class Dry:
    """A tiny random model in place of the real one. family: of longspan.models.tiny; empty: no dry run. experts: of each
    layer, 0 for a dense model. rows: random ones; images: a row has one or none."""

    family: str = ""
    experts: int = 0
    rows: int = 16
    images: bool = False


@dataclass(frozen=True)
class Trajectories:
    """data: the file of rollouts. training.samples: rollouts an optimizer step."""

    run: RunConfig
    engine: EngineConfig
    training: Supervised
    data: str = ""
    dry: Dry = field(default_factory=Dry)

    @property
    def stages(self) -> tuple[str, ...]:
        return ("training",)

    def prepare(self) -> None:
        """Write the tiny model, or say what is wrong with the file before any rank starts."""
        if self.dry.family:
            publish_folder(Path(self.run.folder) / "model", self._write_model)
        else:
            self.training.loss.objective().check(self._samples())

    def train(self, engine: Engine, run: Run) -> None:
        source = self.data or f"the {self.dry.rows} random rows"
        supervised_rows(engine, self._samples(), self.training, run, source=source, stage="training")

    def _samples(self) -> list[Sample]:
        if self.dry.family:
            random = np.random.default_rng(self.run.seed)
            return [random_rollout(random, images=self.dry.images) for _ in range(self.dry.rows)]
        if not self.data:
            raise UserError("recipes/large.py needs a file of rollouts. Give --data FILE, or run a _dry function")
        return read_jsonl(Path(self.data))

    def _write_model(self, folder: Path) -> None:
        over = {"num_experts": self.dry.experts} if self.dry.experts else {}
        build_random(tiny(self.dry.family, **over), torch.float32, self.run.seed).save_pretrained(folder)


def random_rollout(random: np.random.Generator, *, images: bool) -> Sample:
    """A prompt, perhaps with an image, and a sampled answer."""
    ids, media = random.integers(0, TEXT, random.integers(2, 12)).tolist(), []
    if images and random.integers(4):
        high, wide = (int(side) for side in random.integers(1, 5, 2))
        ids += [START, *[IMAGE] * (high * wide), END]
        media = [Image(random.integers(0, 256, (high * CELL, wide * CELL, 3), dtype=np.uint8))]
    prompt, answer = len(ids), int(random.integers(1, 20))
    ids = torch.tensor(ids + random.integers(0, TEXT, answer + 1).tolist())
    length = len(ids) - 1
    mask = (torch.arange(length) >= prompt - 1).float()
    advantage = float(random.standard_normal())
    fields = {"advantage": torch.full((length,), advantage), "old_logprob": torch.full((length,), -4.6)}
    return Sample(ids[:-1], ids[1:], mask, fields=fields, media=media)


def images_9b() -> Trajectories:
    """Geometry-like problems: an image, 1k to 2k tokens, packed to rows of 12,288 over two ranks."""
    return Trajectories(
        run=RunConfig(folder="runs/images_9b", checkpoint_every=10),
        engine=EngineConfig(
            model="Qwen/Qwen3.5-9B",
            backend="megatron",
            layout=Layout(
                dp=2, cp=2, tp=2, sequence_parallel=True, mixer="ulysses", index="contiguous", linear="state"
            ),
            dtype="bfloat16",
            max_tokens_per_rank=12288 // 2,
            recompute="selective",
        ),
        training=Supervised(
            steps=40,
            samples=128,  # 16 problems with 8 answers each
            loss=Loss("ppo", {"clip": 0.2, "clip_high": 0.28}),
            normalise="token",
            optimizer=AdamW(lr=1e-6, betas=(0.9, 0.95), clip_norm=1.0),
            schedule=Schedule("constant", warmup_steps=2),
        ),
    )


def agents_35b() -> Trajectories:
    """Agent trajectories of up to 64k tokens: a row that long stands alone on two ranks, shorter ones are packed."""
    return Trajectories(
        run=RunConfig(folder="runs/agents_35b", checkpoint_every=10),
        engine=EngineConfig(
            model="Qwen/Qwen3.5-35B-A3B",
            backend="megatron",
            layout=Layout(
                dp=4, cp=2, tp=2, ep=8, sequence_parallel=True, mixer="ulysses", index="contiguous", linear="state"
            ),
            dtype="bfloat16",
            max_tokens_per_rank=65536 // 2,
            freeze=("vision", "merger"),
            recompute="full",
        ),
        training=Supervised(
            steps=40,
            samples=64,
            loss=Loss("ppo", {"clip": 0.2, "clip_high": 0.28, "moe_aux": 0.001}),
            normalise="token",
            optimizer=AdamW(lr=1e-6, betas=(0.9, 0.95), clip_norm=1.0),
            schedule=Schedule("constant", warmup_steps=2),
        ),
    )


def images_9b_dry() -> Trajectories:
    """The layout of images_9b with dp=1: 4 processes."""
    return _dry(images_9b(), Dry("qwen3_5_vl", images=True), "runs/images_9b_dry", dp=1)


def agents_35b_dry() -> Trajectories:
    """The layout of agents_35b: 16 processes; text only, 8 experts."""
    return _dry(agents_35b(), Dry("qwen3_5_moe", experts=8), "runs/agents_35b_dry", dp=4)


def _dry(job: Trajectories, dry: Dry, folder: str, *, dp: int) -> Trajectories:
    engine = replace(
        job.engine,
        model="{run}/model",
        layout=replace(job.engine.layout, dp=dp),
        dtype="float64",
        max_tokens_per_rank=48,
        freeze=(),
    )
    training = replace(job.training, steps=2, samples=8, schedule=Schedule("constant"))
    return replace(job, run=RunConfig(folder=folder), engine=engine, training=training, dry=dry)
