"""Training on given samples: warm-up, SFT, or any policy loss on recorded trajectories. One optimizer step a batch.

`batch(cursor, count)` gives the next samples and the names of their rows: a pure function of the data cursor, as in
the GRPO loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from longspan.data import Sample
from longspan.engine import Engine
from longspan.errors import UserError
from longspan.observe import Progress
from longspan.rl.config import Supervised
from longspan.rl.numbers import step_numbers
from longspan.rl.run import Position, Run
from longspan.rl.task import EpochOrder
from longspan.typed import typed

__all__ = ["supervised", "supervised_rows"]

Batch = Callable[[int, int], tuple[Sequence[Sample], Sequence[str]]]  # (cursor, count) -> samples, row names


@typed
def supervised_rows(
    engine: Engine, samples: Sequence[Sample], config: Supervised, run: Run, *, source: str, stage: str
) -> None:
    """`supervised` on the rows of a file, walked in a seeded order, epoch after epoch. Collective.

    Raises UserError before the first step for a row that the model or the token budget cannot take, naming `source`.
    """
    try:
        engine.check(samples)
    except UserError as error:
        raise UserError(f"{source}, where sample 0 is line 1: {error}") from error
    order = EpochOrder(len(samples), run.config.seed)

    def batch(cursor: int, count: int) -> tuple[list[Sample], list[str]]:
        rows = [order[number] for number in range(cursor, cursor + count)]
        return [samples[row] for row in rows], [f"line-{row + 1}" for row in rows]

    supervised(engine, batch, config, run, stage=stage)


@typed
def supervised(engine: Engine, batch: Batch, config: Supervised, run: Run, *, stage: str = "supervised") -> None:
    """Run the stage from where it stands to its last step. Collective."""
    position = run.start(stage)
    if position is None:
        return
    objective, phases = config.loss.objective(), run.phases
    with Progress(stage, config.steps, enabled=run.lead) as progress:
        for step in range(position.step, config.steps):
            with phases("data"):
                samples, names = batch(position.consumed, config.samples)
            with phases("update"):
                factor = config.schedule.factor(step, config.steps)
                settings = replace(config.optimizer, lr=config.optimizer.lr * factor)
                numbers = engine.forward_backward(samples, objective, normalise=config.normalise)
                numbers = step_numbers(numbers, engine.optim_step(settings))
            position = Position(stage, step + 1, position.consumed + config.samples)
            numbers |= phases.take()
            numbers["tok/per_s"] = sum(len(sample) for sample in samples) / numbers["time/update_s"]
            run.record(position, numbers, [{"row": name} for name in names])
            progress.show(step + 1, numbers)
            if run.end_step(position, last=step + 1 == config.steps):
                return
