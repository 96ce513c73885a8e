"""The sampler is the policy that is trained: its log-probs are the engine's, at any temperature, placeholders sampled
or not, and the rollouts do not depend on the number of ranks."""

import numpy as np
import pytest

from longspan.launch import launch

FAMILIES = {
    "qwen3": 1e-9,
    "qwen3_vl": 1e-9,
    "qwen3_5": 1e-4,
}  # largest log-prob difference in fp64; the last runs HF's fp32 rule


def prompts_of(family, adapter):
    """Prompts of two lengths; for a VLM with 0 to 2 pictures."""
    from longspan import Image
    from longspan.rl import Prompt

    random = np.random.default_rng(0)
    prompts = []
    for number in range(6):
        text = random.integers(0, 90, 5 + number % 2).tolist()
        pictures = number % 3 if family.endswith("vl") else 0
        ids, media = list(text), []
        for _ in range(pictures):
            image = Image(random.integers(0, 255, (16, 8 * (1 + number % 2), 3)).astype(np.uint8))
            tokens = sum(adapter.reader.run_lengths(adapter.reader.grid(image)))
            ids = [*ids, 95, *[93] * tokens, 96]
            media.append(image)
        prompts.append(Prompt(f"p{number}", (*ids, 7), tuple(media)))
    return prompts


def sample_and_score(family, temperature):
    """Worst difference between sampler and engine, and the rollouts."""
    from longspan import Engine, EngineConfig, Layout, world
    from longspan.rl.loop import to_samples
    from longspan.rl.rollout import EmbeddedSampler, Sampling, sample_shared

    layout = Layout(cp=world().ranks)
    engine = Engine.build(EngineConfig(f"tiny:{family}", layout=layout, dtype="float64", max_tokens_per_rank=64))
    prompts = prompts_of(family, engine.adapter)
    sampler = EmbeddedSampler(engine, eos=[3])
    sampler.load(engine.state_dict())
    sampling = Sampling(3, temperature, 6, prompts_per_batch=2, seed=1, stream=0)
    groups = sample_shared(sampler, prompts, range(len(prompts)), sampling, engine.mesh.all)
    samples = to_samples(prompts, groups, [0.0] * 18, temperature)
    outputs = engine.forward(samples, outputs=("logprob",))
    pairs = zip(outputs, samples, strict=True)
    worst = max(float((out["logprob"] - s.fields["old_logprob"]).abs()[s.mask > 0].max()) for out, s in pairs)
    control = max(  # log-probs at temperature 1 for tokens that were sampled at another: must be far off
        float((out["logprob"] * temperature - s.fields["old_logprob"]).abs()[s.mask > 0].max())
        for out, s in zip(outputs, samples, strict=True)
    )
    ids = [[rollout.ids for rollout in group] for group in groups]
    return worst, control, ids


def every_family():
    return {family: sample_and_score(family, 0.7) for family in FAMILIES}


def test_sampler_is_the_engine_and_ranks_do_not_matter():
    two = launch(every_family, ranks=2, timeout_s=58)
    one = launch(every_family, ranks=1, timeout_s=58)
    assert two[0] == two[1]
    for family, tolerance in FAMILIES.items():
        worst, control, ids = two[0][family]
        assert worst < tolerance < control, family
        assert ids == one[0][family][2], family
    placed = [token for group in two[0]["qwen3_vl"][2] for ids in group for token in ids]
    assert any(token in (93, 94, 95, 96) for token in placed)  # special ids were sampled and are plain tokens (G7)


def test_missing_weights_are_named():
    def refuse():
        from longspan import Engine, EngineConfig, UserError
        from longspan.rl.rollout import EmbeddedSampler

        engine = Engine.build(EngineConfig("tiny:qwen3"))
        weights = engine.state_dict()
        name = next(iter(weights))
        weights.pop(name)
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            EmbeddedSampler(engine, eos=[3]).load(weights)

    launch(refuse, ranks=1, timeout_s=58)
