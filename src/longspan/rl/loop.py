"""GRPO as one flat loop: sample, reward, advantage, old and reference log-probs, mini-batches, metrics, checkpoint.

Read `grpo` top to bottom; what it calls are functions of their arguments. All ranks run it with the same prompts,
rollouts and samples, and the engine cuts them. Prompts come from the task's stream at the data cursor, so a resumed
run trains on what the uninterrupted one would have.

What it does not do: sampling beside training (the first mini-batch of a round is exactly on-policy), critics.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor

from longspan.data import Sample
from longspan.engine import Engine
from longspan.objective import Objective
from longspan.observe import Progress
from longspan.rl.advantage import ADVANTAGES
from longspan.rl.config import Grpo, check_start
from longspan.rl.evaluate import describe, evaluate
from longspan.rl.gap import logprob_gap
from longspan.rl.numbers import first_gap, merge_updates, reward_numbers, step_numbers
from longspan.rl.reference import frozen_reference
from longspan.rl.rollout import EmbeddedSampler, Sampling, sample_shared
from longspan.rl.run import Position, Run
from longspan.rl.samples import rollout_sample, with_field
from longspan.rl.task import Prompt, Rollout, Task

__all__ = ["grpo"]

TRAIN_STREAM = 0  # of random numbers; evaluation uses 1
SHOWN = 6  # held-out prompts whose rollouts go into the report


def grpo(engine: Engine, task: Task, config: Grpo, run: Run, *, stage: str = "grpo") -> None:
    """Run the stage from where it stands to its last round. Collective."""
    position = run.start(stage)
    if position is None:
        return
    check_start(engine.config, longest_prompt=task.max_prompt_tokens, max_new_tokens=config.max_new_tokens)
    objective, advantage, phases = config.loss.objective(), ADVANTAGES[config.advantage], run.phases
    sampler, sampling = EmbeddedSampler(engine, task.eos), sampling_of(config, run.config.seed)
    sampler.load(engine.state_dict())
    reference = frozen_reference(engine, run.folder / "reference", fresh=position.step == 0) if config.loss.kl else None
    if position.step == 0 and config.eval_every:
        run.record(position, _evaluate(sampler, task, config, run, position), rows=())
    with Progress(stage, config.steps, enabled=run.lead) as progress:
        for step in range(position.step, config.steps):
            with phases("sample"):
                cursor = range(position.consumed, position.consumed + config.prompts)
                prompts = [task.train_prompt(number) for number in cursor]
                groups = sample_shared(sampler, prompts, cursor, sampling, engine.mesh.all)
            with phases("reward"):
                rewards = rewards_of(task, prompts, groups)
                ids = [number for number in cursor for _ in range(config.group_size)]
                advantages = advantage(list(chain(*rewards)), ids)
                samples = to_samples(prompts, groups, advantages, config.temperature)
            with phases("logprobs"):
                gap = {}
                if config.old_logprob == "engine":
                    samples, gap = recomputed(engine, samples)
                if reference is not None:
                    samples = with_logprobs(samples, "ref_logprob", logprobs(reference, samples))
            with phases("update"):
                numbers = update(engine, samples, objective, config, step)
            with phases("sync"):
                sampler.load(engine.state_dict())
            position = Position(stage, step + 1, cursor.stop)
            last = step + 1 == config.steps
            if config.eval_every and (last or (step + 1) % config.eval_every == 0):
                with phases("evaluate"):
                    numbers |= _evaluate(sampler, task, config, run, position)
            numbers |= (
                reward_numbers(rewards, groups) | gap | phases.take()
            )  # a gap of all samples replaces the first batch's
            numbers["tok/per_s"] = config.epochs * sum(len(sample) for sample in samples) / numbers["time/update_s"]
            run.record(position, numbers, rows_of(prompts, rewards))
            progress.show(step + 1, numbers)
            if run.end_step(position, last=last):
                return


def sampling_of(config: Grpo, seed: int) -> Sampling:
    """How a training round samples."""
    return Sampling(
        num=config.group_size,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        prompts_per_batch=config.sampler_prompts,
        seed=seed,
        stream=TRAIN_STREAM,
    )


def to_samples(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]], advantages: Sequence[float], temperature: float
) -> list[Sample]:
    """One sample a rollout, prompt by prompt; the samples of a prompt share its media objects."""
    pairs = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
    return [
        rollout_sample(prompt, rollout, advantage=advantage, temperature=temperature, group=prompt.id)
        for (prompt, rollout), advantage in zip(pairs, advantages, strict=True)
    ]


def rewards_of(task: Task, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]) -> list[list[float]]:
    """The rewards of each prompt's rollouts."""
    pairs = zip(prompts, groups, strict=True)
    return [[task.reward(prompt, rollout.ids) for rollout in group] for prompt, group in pairs]


def rows_of(prompts: Sequence[Prompt], rewards: Sequence[Sequence[float]]) -> list[dict[str, object]]:
    """What a round trained on, for rows.jsonl."""
    return [{"prompt": prompt.id, "rewards": list(group)} for prompt, group in zip(prompts, rewards, strict=True)]


def logprobs(engine: Engine, samples: Sequence[Sample]) -> list[Tensor]:
    """The engine's log-prob of every target, [L] a sample."""
    return [out["logprob"] for out in engine.forward(samples, outputs=("logprob",))]


def with_logprobs(samples: Sequence[Sample], name: str, values: Sequence[Tensor]) -> list[Sample]:
    return [with_field(sample, name, found) for sample, found in zip(samples, values, strict=True)]


def recomputed(engine: Engine, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
    """The samples with the engine's own log-probs as old_logprob, and the gap to the sampler's."""
    trainer = logprobs(engine, samples)
    gap = logprob_gap([s.fields["old_logprob"] for s in samples], trainer, [s.mask for s in samples])
    return with_logprobs(samples, "old_logprob", trainer), gap


def update(
    engine: Engine, samples: Sequence[Sample], objective: Objective, config: Grpo, step: int
) -> dict[str, float]:
    """All optimizer steps of a round; groups stay whole. Returns their numbers merged, and the gap before the first."""
    size = config.group_size * (config.mini_batch_prompts or config.prompts)
    starts = [start for _ in range(config.epochs) for start in range(0, len(samples), size)]
    found = []
    for number, start in enumerate(starts, start=step * config.updates):
        factor = config.schedule.factor(number, config.steps * config.updates)
        settings = replace(config.optimizer, lr=config.optimizer.lr * factor)
        numbers = engine.forward_backward(samples[start : start + size], objective, normalise=config.normalise)
        found.append(step_numbers(numbers, engine.optim_step(settings)))
    return merge_updates(found) | first_gap(found[0])


def _evaluate(sampler: EmbeddedSampler, task: Task, config: Grpo, run: Run, position: Position) -> dict[str, float]:
    numbers, rollouts = evaluate(sampler, task, config, seed=run.config.seed, group=run.engine.mesh.all)
    prompts = task.eval_prompts()
    every = max(1, len(prompts) // SHOWN)
    run.show(position, describe(task, prompts[::every][:SHOWN], rollouts[::every][:SHOWN]))
    return numbers
