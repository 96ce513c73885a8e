"""Settings of the loops: valid by construction, every size with its unit. Relations between sizes are checked here, and
`check_start` checks those that need the engine and the task; nothing is rounded, dropped or discovered at the first
step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from longspan.engine import AdamW, EngineConfig
from longspan.errors import UserError
from longspan.objective import Objective
from longspan.rl.advantage import ADVANTAGES
from longspan.rl.schedule import Schedule
from longspan.typed import typed

__all__ = ["Grpo", "Loss", "RunConfig", "Supervised", "check_start"]


@typed
@dataclass(frozen=True, slots=True)
class RunConfig:
    """Where a run lives and how it is kept. Starting it again in the same folder resumes from the newest checkpoint.

    folder: the run folder. seed: of prompts, sampling and data order. checkpoint_every: optimizer-loop steps, 0 is
    only at the end of a stage. keep_checkpoints: how many of the newest stay. copies: None copies metrics to
    TensorBoard and W&B where installed; or their names.
    """

    folder: str
    seed: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    copies: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _at_least("run.checkpoint_every", self.checkpoint_every, 0)
        _at_least("run.keep_checkpoints", self.keep_checkpoints, 1)


@typed
@dataclass(frozen=True, slots=True)
class Loss:
    """An objective that a command line can set. name: of longspan.objective's LOSSES. options: of that loss (clip=0.2).

    kl: coefficient of KL to the frozen reference. entropy: of the entropy bonus.
    """

    name: str
    options: Mapping[str, float] = field(default_factory=dict)
    kl: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0

    def __post_init__(self) -> None:
        self.objective()

    def objective(self) -> Objective:
        """The engine's form; raises UserError for a name or an option that does not exist."""
        return Objective(self.name, kl=self.kl, kl_estimator=self.kl_estimator, entropy=self.entropy, **self.options)


@typed
@dataclass(frozen=True, slots=True)
class Supervised:
    """Training on given samples, one optimizer step a batch.

    steps: optimizer steps. samples: samples a step. loss: loss terms. normalise: rule of the token weights.
    optimizer: its lr is the schedule's peak.
    """

    steps: int
    samples: int
    loss: Loss = field(default_factory=lambda: Loss("cross_entropy"))
    normalise: str = "token"
    optimizer: AdamW = field(default_factory=lambda: AdamW(lr=1e-3, clip_norm=1.0))
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("samples", self.samples, 1)
        _within("schedule.warmup_steps", self.schedule.warmup_steps, "steps", self.steps)


@typed
@dataclass(frozen=True, slots=True)
class Grpo:
    """Reinforcement learning with a group baseline.

    steps: rounds of sampling. prompts: prompts a round. group_size: rollouts a prompt. mini_batch_prompts: prompts an
    optimizer step (their groups stay whole); None is all of a round. epochs: passes over a round.
    max_new_tokens: longest response. temperature: of sampling, and so of the policy that is trained.
    advantage: rule within a group. loss: loss terms; kl needs a frozen reference engine, which the loop builds.
    old_logprob: "sampler" takes the log-probs recorded while sampling, "engine" recomputes them before the first
    update. eval_every: rounds between evaluations, 0 is none. eval_samples: sampled responses a held-out prompt.
    sampler_prompts: prompts that one forward pass of the sampler holds.
    """

    steps: int
    prompts: int
    group_size: int
    max_new_tokens: int
    loss: Loss
    mini_batch_prompts: int | None = None
    epochs: int = 1
    temperature: float = 1.0
    advantage: str = "grpo"
    normalise: str = "token"
    old_logprob: Literal["sampler", "engine"] = "sampler"
    optimizer: AdamW = field(default_factory=lambda: AdamW(lr=1e-5, clip_norm=1.0))
    schedule: Schedule = field(default_factory=Schedule)
    eval_every: int = 0
    eval_samples: int = 1
    sampler_prompts: int = 16

    def __post_init__(self) -> None:
        for name, value, least in (
            ("steps", self.steps, 1),
            ("prompts", self.prompts, 1),
            ("max_new_tokens", self.max_new_tokens, 1),
            ("epochs", self.epochs, 1),
            ("eval_every", self.eval_every, 0),
            ("eval_samples", self.eval_samples, 1),
            ("sampler_prompts", self.sampler_prompts, 1),
        ):
            _at_least(name, value, least)
        if self.group_size < 2:
            raise UserError(
                f"group_size={self.group_size} leaves a rollout without a baseline (all advantages 0). Use 2 or more"
            )
        if self.advantage not in ADVANTAGES:
            raise UserError(f"advantage={self.advantage!r} is not one of {tuple(ADVANTAGES)}")
        if not self.temperature > 0:
            raise UserError(
                f"temperature={self.temperature} must be above 0: a greedy policy has no gradient to follow"
            )
        mini = self.prompts if self.mini_batch_prompts is None else self.mini_batch_prompts
        _at_least("mini_batch_prompts", mini, 1)
        if self.prompts % mini:
            raise UserError(
                f"prompts={self.prompts} must be a multiple of mini_batch_prompts={mini}, else a round ends in a "
                f"partial mini-batch of {self.prompts % mini} prompts. Use prompts={-(-self.prompts // mini) * mini}, "
                f"or a mini_batch_prompts that divides {self.prompts}"
            )
        _within("schedule.warmup_steps", self.schedule.warmup_steps, "optimizer steps", self.steps * self.updates)

    @property
    def updates(self) -> int:
        """Optimizer steps a round."""
        return self.epochs * (self.prompts // (self.mini_batch_prompts or self.prompts))


def check_start(engine: EngineConfig, *, longest_prompt: int, max_new_tokens: int) -> None:
    """The longest sample must fit the token budget of a CP group; said with all numbers before the first step."""
    if engine.max_tokens_per_rank == "auto":
        return
    fits = engine.max_tokens_per_rank * engine.layout.cp
    needed = longest_prompt + max_new_tokens - 1  # the last sampled token is a target only
    if needed > fits:
        raise UserError(
            f"the longest sample has {needed} tokens (prompt {longest_prompt} + max_new_tokens {max_new_tokens} - 1), "
            f"but a group holds max_tokens_per_rank={engine.max_tokens_per_rank} x cp={engine.layout.cp} = {fits}. "
            f"Raise max_tokens_per_rank to {-(-needed // engine.layout.cp)} or more, raise cp, or lower max_new_tokens"
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}={value} must be at least {least}")


def _within(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise UserError(
            f"{name}={value} is more than the {limit} {limit_name} of the run: the peak is never reached. Lower it"
        )
