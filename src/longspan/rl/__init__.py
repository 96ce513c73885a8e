"""Reinforcement learning on the public API: a flat GRPO loop, a supervised loop, an embedded sampler, run folders.

Read loop.py first, then rollout/embedded.py, run.py and train.py. A recipe (recipes/) needs only the names below.
"""

from longspan.rl.advantage import gae, rloo
from longspan.rl.advantage import grpo as grpo_advantage
from longspan.rl.config import Grpo, Loss, RunConfig, Supervised
from longspan.rl.loop import grpo
from longspan.rl.rewards import exact_match
from longspan.rl.run import Run, publish_folder
from longspan.rl.samples import answer_sample, rollout_sample
from longspan.rl.schedule import Schedule
from longspan.rl.supervised import supervised, supervised_rows
from longspan.rl.task import EpochOrder, Prompt, Rollout, Task

__all__ = [
    "EpochOrder",
    "Grpo",
    "Loss",
    "Prompt",
    "Rollout",
    "Run",
    "RunConfig",
    "Schedule",
    "Supervised",
    "Task",
    "answer_sample",
    "exact_match",
    "gae",
    "grpo",
    "grpo_advantage",
    "publish_folder",
    "rloo",
    "rollout_sample",
    "supervised",
    "supervised_rows",
]
