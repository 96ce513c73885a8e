"""Prints the numbers of docs/tour.md: three samples through two ranks, step by step.

    .venv/bin/python docs/tour.py
"""

import torch

from longspan import Engine, EngineConfig, Layout, Objective, Sample, launch
from longspan.data import pack
from longspan.layout import layout_index
from longspan.objective import token_weights


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for length, prompt in ((5, 2), (9, 4), (2, 1)):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.arange(length) >= prompt).float()
        advantage = torch.full((length,), float(len(made)) - 0.5, dtype=torch.float64)
        made.append(Sample(ids[:-1], ids[1:], mask, {"advantage": advantage, "old_logprob": torch.full((length,), -4.5)}))
    return made


def run(cp: int) -> tuple[list[float], float, list[str]]:
    batch = samples()
    objective = Objective("importance_sampling")
    layout = Layout(cp=cp, mixer="ring" if cp > 1 else "auto")
    engine = Engine.build(EngineConfig(model="tiny:qwen3", layout=layout, dtype="float64", max_tokens_per_rank=16))
    lines = []
    weights = token_weights(batch, objective, "token")
    admitted = engine._admit(batch, objective.fields, weights)
    plan = engine.planner.plan(admitted)
    for number, rows in enumerate(plan.micro_steps):
        for row in rows:
            stream = pack(row, [admitted.tensors[i] for i in row.samples], admitted.declared, engine.mesh.layout.index)
            lines.append(f"micro-step {number}: samples {row.samples} on ranks {row.start}..{row.start + row.size - 1}")
            lines.append(f"  cu_seqlens {stream.cu_seqlens.tolist()}")
            lines.append(f"  input_ids  {stream.fields['input_ids'].tolist()}")
            lines.append(f"  target_ids {stream.fields['target_ids'].tolist()}")
            lines.append(f"  position   {stream.fields['position'].tolist()}")
            lines.append(f"  weight     {[round(w, 3) for w in stream.fields['weight/importance_sampling'].tolist()]}")
            for rank, index in enumerate(layout_index(stream.index, stream.cu_seqlens, row.size)):
                lines.append(f"  rank {rank} holds {index.tolist()}")
    out = engine.forward(batch)
    metrics = engine.forward_backward(batch, objective)
    gradient = engine.gradients()["model.layers.0.self_attn.q_proj.weight"]
    lines.append(f"  log-probs of sample 1: {[round(x, 6) for x in out[1].logprob.tolist()]}")
    lines.append(f"  loss {metrics['loss/total']:.15f}, trained tokens {metrics['tok/trained']:.0f}")
    return out[1].logprob.tolist(), gradient.norm().item(), lines


if __name__ == "__main__":
    for cp in (1, 2):
        logprob, norm, lines = launch(run, cp, ranks=cp, timeout_s=120)[0]
        print(f"cp={cp}\n" + "\n".join(lines) + f"\n  |gradient of layer 0's q_proj| {norm:.15f}")
