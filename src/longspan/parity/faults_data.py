"""Faults in what a rank is given: targets, masks, weights, positions, fields, media rows, plans."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from longspan.data import Plan, Row, Stream
from longspan.layout import Shard
from longspan.parity.mutation import Change, Fault

SHARD = "longspan.engine.steps:shard"
PACK = "longspan.engine.steps:pack"
PLAN = "longspan.engine.planning:make_plan"


def on_shard(change: Callable[[dict[str, Tensor], Shard], dict[str, Tensor]]) -> Change:
    """Alters a rank's fields after the cut."""

    def make(original):
        def shard(*args):
            piece = original(*args)
            return replace(piece, fields={**piece.fields, **change(dict(piece.fields), piece)})

        return shard

    return (SHARD, make)


def on_stream(change: Callable[[dict[str, Tensor], Stream], dict[str, Tensor]]) -> Change:
    """Alters a row's fields before the cut."""

    def make(original):
        def pack(*args, **kwargs):
            stream = original(*args, **kwargs)
            return replace(stream, fields={**stream.fields, **change(dict(stream.fields), stream)})

        return pack

    return (PACK, make)


def weights_of(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values for name, values in fields.items() if name.startswith("weight/")}


def roll_shard(fields: dict[str, Tensor], piece: Shard) -> dict[str, Tensor]:
    """Labels made by rolling the rank's own ids: right inside a shard, wrong at its edges."""
    needed = fields["needed"]
    rolled = fields["input_ids"].roll(-1)
    edge = torch.zeros_like(needed)
    edge[[run.row + run.stop - run.start - 1 for run in piece.info.runs]] = True
    return {"target_ids": torch.where(needed & edge, rolled, fields["target_ids"])}


def roll_stream(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    """Labels made by rolling the packed row: the last token of each document predicts its neighbour's first."""
    return {"target_ids": torch.where(fields["needed"], fields["input_ids"].roll(-1), 0)}


def mean_of_means(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    return {name: w / w.sum().clamp(min=1e-300) * 0.5 for name, w in weights_of(fields).items()}


def shard_mean(fields: dict[str, Tensor], piece: Shard) -> dict[str, Tensor]:
    return {name: w / w.sum() / piece.info.size for name, w in weights_of(fields).items()}


def one_term_mean(term: str) -> Callable[[dict[str, Tensor], Stream], dict[str, Tensor]]:
    """One term is normalised by its micro-step, the others by the batch."""

    def change(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
        name = f"weight/{term}"
        return {name: fields[name] / fields[name].sum().clamp(min=1e-300) * 0.5} if name in fields else {}

    return change


def unmasked(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    """Weights on every token, the prompt included."""
    return {name: torch.full_like(w, float(w.max())) for name, w in weights_of(fields).items()} | {
        "needed": torch.ones_like(fields["needed"])
    }


def fp32_weights(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    return {name: w.float().double() for name, w in weights_of(fields).items()}


def shard_positions(fields: dict[str, Tensor], piece: Shard) -> dict[str, Tensor]:
    position = fields["position"]
    return {"position": torch.arange(position.shape[-1]).expand(position.shape).clone()}


def stream_positions(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    position = fields["position"]
    return {"position": torch.arange(position.shape[-1]).expand(position.shape).clone()}


def rolled_field(name: str, steps: int) -> Callable[[dict[str, Tensor], Stream], dict[str, Tensor]]:
    def change(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
        return {name: fields[name].roll(steps, -1)} if name in fields else {}

    return change


def same_part(name: str) -> Callable[[dict[str, Tensor], Shard], dict[str, Tensor]]:
    """A field that the cut forgot: every rank sees the row's beginning (here: its own part in reverse)."""

    def change(fields: dict[str, Tensor], piece: Shard) -> dict[str, Tensor]:
        return {name: fields[name].flip(-1)} if name in fields else {}

    return change


def no_temperature(fields: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    return {"temperature": torch.ones_like(fields["temperature"])}


def unshifted_rows(original):
    return lambda tensors, tokens: [dict(row) for row in tensors]


def text_positions(original):
    return lambda length, spans: torch.arange(length).expand(3, length).clone()


def duplicated(original):
    """Every data rank gets the first one's rows; the others' samples are never seen."""

    def make_plan(*args, **kwargs):
        plan: Plan = original(*args, **kwargs)
        steps = tuple(tuple(Row(rows[0].samples, r.start, r.size) for r in rows) for rows in plan.micro_steps)
        return replace(plan, micro_steps=steps)

    return make_plan


def dropped_tail(original):
    """Floor division in a count: the last micro-step is lost."""

    def make_plan(*args, **kwargs):
        plan: Plan = original(*args, **kwargs)
        return replace(plan, micro_steps=plan.micro_steps[: max(1, len(plan.micro_steps) - 1)])

    return make_plan


def neighbours_shard(original):
    """Fields are cut for the neighbour, while attention thinks they are this rank's."""

    def shard(stream, group, device):
        piece = original(stream, group, device)
        index = piece.info.indices[(piece.info.rank + 1) % piece.info.size]
        return replace(piece, fields={name: x.index_select(-1, index).to(device) for name, x in stream.fields.items()})

    return shard


VL = "tiny:qwen3_vl"
FAULTS = (
    Fault("shift", "E1 labels rolled on the shard: wrong at each shard edge", (on_shard(roll_shard),)),
    Fault(
        "shift-pack",
        "E3 labels rolled on the packed row: each document's last token predicts its neighbour",
        (on_stream(roll_stream),),
        layout="dp2",
    ),
    Fault(
        "denominator",
        "A1 each micro-step divides by its own tokens: a mean of means",
        (on_stream(mean_of_means),),
        layout="dp2",
    ),
    Fault(
        "denominator-shard",
        "A8 each CP shard divides by its own tokens; 0/0 where it has none",
        (on_shard(shard_mean),),
    ),
    Fault(
        "kl-denominator",
        "A16 the KL term alone is normalised per micro-step",
        (on_stream(one_term_mean("kl")),),
        layout="dp2",
    ),
    Fault(
        "value-denominator",
        "A16 the value term alone is normalised per micro-step",
        (on_stream(one_term_mean("value")),),
        layout="dp2",
    ),
    Fault("mask-ignored", "L7 prompt and pads are trained on", (on_stream(unmasked),), layout="dp2"),
    Fault(
        "weights-fp32", "token weights lose half their digits before the sum", (on_stream(fp32_weights),), layout="dp2"
    ),
    Fault("positions", "D1 positions start at 0 on every rank", (on_shard(shard_positions),)),
    Fault(
        "positions-packed",
        "G1 positions run on through the packed row (RoPE is relative: only rounding shows)",
        (on_stream(stream_positions),),
        layout="dp2",
    ),
    Fault(
        "positions-mrope",
        "G1 images take text positions",
        (("longspan.models.qwen3_vl:mrope_positions", text_positions),),
        model=VL,
        layout="cp2-ulysses",
    ),
    Fault(
        "old-logprob-shift",
        "E5 sampler log-probs one token late",
        (on_stream(rolled_field("old_logprob", 1)),),
        layout="dp2",
    ),
    Fault(
        "advantage-shift", "E5 advantages one token early", (on_stream(rolled_field("advantage", -1)),), layout="dp2"
    ),
    Fault("ref-uncut", "F7 the reference log-probs miss the cut", (on_shard(same_part("ref_logprob")),)),
    Fault("teacher-uncut", "F7 teacher ids miss the cut", (on_shard(same_part("teacher_ids")),), case="distill_topk"),
    Fault("temperature", "F5 the trainer ignores the sampling temperature", (on_stream(no_temperature),), layout="dp2"),
    Fault("temperature-uncut", "F7 the temperature misses the cut", (on_shard(same_part("temperature")),)),
    Fault(
        "media-rows",
        "G10 image rows count from the sample, not from the packed row",
        (("longspan.engine.steps:offset_media_rows", unshifted_rows),),
        model=VL,
        layout="cp2-ulysses",
    ),
    Fault("duplicated-rows", "H5 every data rank trains on the first one's rows", ((PLAN, duplicated),), layout="dp2"),
    Fault("dropped-tail", "C10 floor division drops the last micro-step", ((PLAN, dropped_tail),), layout="dp2"),
    Fault(
        "index-rotated",
        "attention thinks tokens live on the neighbour's places",
        ((SHARD, neighbours_shard),),
        layout="cp2-gather",
    ),
)
