"""Evaluation on held-out prompts: sampled pass@1 and greedy. Any number of prompts: nothing is rounded to a batch.

`eval/pass@1` is the mean reward of sampled responses (temperature 1), `eval/greedy` that of the most likely one,
token by token. The random numbers are the same at every evaluation, so two of them differ by the weights alone.
Standard error of a share p over n prompts: sqrt(p (1 - p) / n).
"""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longspan.data import Image
from longspan.layout import CPGroup
from longspan.observe.plots import data_uri
from longspan.rl.config import Grpo
from longspan.rl.rollout import Sampling, sample_shared
from longspan.rl.rollout.share import Sampler
from longspan.rl.task import Prompt, Rollout, Task

__all__ = ["describe", "evaluate"]

EVAL_STREAM = 1  # of random numbers; training rounds use 0


def evaluate(
    sampler: Sampler, task: Task, config: Grpo, *, seed: int, group: CPGroup
) -> tuple[dict[str, float], list[list[Rollout]]]:
    """Numbers, and the sampled rollouts of each held-out prompt. Collective; equal on all ranks."""
    prompts = task.eval_prompts()
    numbers = range(len(prompts))
    sampling = Sampling(
        num=config.eval_samples,
        temperature=1.0,
        max_new_tokens=config.max_new_tokens,
        prompts_per_batch=config.sampler_prompts,
        seed=seed,
        stream=EVAL_STREAM,
    )
    sampled = sample_shared(sampler, prompts, numbers, sampling, group)
    greedy = sample_shared(sampler, prompts, numbers, replace(sampling, num=1, temperature=0.0), group)
    return {"eval/pass@1": _mean(task, prompts, sampled), "eval/greedy": _mean(task, prompts, greedy)}, sampled


def describe(task: Task, prompts: Sequence[Prompt], rollouts: Sequence[Sequence[Rollout]]) -> list[dict[str, Any]]:
    """Rows for the report: text, pictures and what was answered."""
    return [
        {
            "prompt": prompt.id,
            "text": task.text(prompt.input_ids),
            "images": [_picture(item) for item in prompt.media if isinstance(item, Image)],
            "answer": task.text(prompt.answer),
            "responses": [
                {"text": task.text(found.ids), "reward": task.reward(prompt, found.ids), "logprob": sum(found.logprobs)}
                for found in answers
            ],
        }
        for prompt, answers in zip(prompts, rollouts, strict=True)
    ]


def _mean(task: Task, prompts: Sequence[Prompt], rollouts: Sequence[Sequence[Rollout]]) -> float:
    pairs = zip(prompts, rollouts, strict=True)
    rewards = [task.reward(prompt, found.ids) for prompt, answers in pairs for found in answers]
    return sum(rewards) / len(rewards)


def _picture(image: Image) -> str:
    buffer = io.BytesIO()
    picture = image.load()
    picture.thumbnail((128, 128))
    picture.save(buffer, format="PNG")
    return data_uri(buffer.getvalue())
