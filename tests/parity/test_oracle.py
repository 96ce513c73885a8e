"""The oracle itself, against the plainest references there are: HF's own layers, torch's optimizer, sums by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longspan.data import Image, Sample
from longspan.parity import formulas
from longspan.parity.cases import TEACHER, Case, default_cases
from longspan.parity.oracle_attention import plain_attention, use_plain_layers
from longspan.parity.oracle_media import hidden_with_media
from longspan.parity.oracle_routers import RouterLog
from longspan.parity.reference import Reference, load_plain
from longspan.parity.samples import default_samples, fill_fields

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gpt_oss", "qwen3_moe", "qwen3_5", "qwen3_next")
MEDIA_FAMILIES = ("qwen3_vl", "qwen3_5_vl")


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_layers_are_hf_layers(family: str) -> None:
    """In fp32 the oracle's attention, sinks, windows and recurrence agree with unmodified HF."""
    ids = torch.randint(0, 97, (1, 70), generator=torch.Generator().manual_seed(0))
    own, unmodified = (load_plain(f"tiny:{family}", torch.float32, 0) for _ in range(2))
    use_plain_layers(own)
    with torch.no_grad():
        got, want = (model(input_ids=ids, use_cache=False).logits for model in (own, unmodified))
    assert (got - want).abs().max() < 2e-4 * want.abs().max()


def test_a_window_and_a_sink_change_the_oracle() -> None:
    """Control of the test above: without them the numbers differ."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.is_causal = True
    full = plain_attention(module, q, k, v, None, 0.3)[0]
    windowed = plain_attention(module, q, k, v, None, 0.3, sliding_window=8)[0]
    sunk = plain_attention(module, q, k, v, None, 0.3, s_aux=torch.zeros(4))[0]
    assert torch.equal(full[:, :8], windowed[:, :8])
    assert not torch.allclose(full[:, 8:], windowed[:, 8:])
    assert not torch.allclose(full, sunk)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_adamw_is_torch_adamw(clip_norm: float | None) -> None:
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    samples = fill_fields(default_samples(reference, [9, 4]), reference)
    twin = load_plain("tiny:qwen3", torch.float64, 0)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        gradients = reference.run(samples, Case("ppo", "ppo")).gradients
        for name, parameter in twin.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip_norm or float("inf"))
        optimizer.step()
        own = reference.adamw(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=clip_norm)
        assert own == pytest.approx(float(norm), rel=1e-12)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(reference.weights()[name], parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("rule", "denominator", "want"),
    [
        ("token", None, [[0.25, 0.25], [0.25, 0.25, 0], [0]]),
        ("token", 8.0, [[0.125, 0.125], [0.125, 0.125, 0], [0]]),
        ("sample", None, [[0.25, 0.25], [0.25, 0.25, 0], [0]]),
        ("sample_sum", None, [[0.5, 0.5], [0.5, 0.5, 0], [0]]),
        ("constant", 10.0, [[0.1, 0.1], [0.1, 0.1, 0], [0]]),
        ("sum", None, [[1, 1], [1, 1, 0], [0]]),
    ],
)
def test_weights_by_hand(rule: str, denominator: float | None, want: list[list[float]]) -> None:
    masks = [torch.ones(2), torch.tensor([1.0, 1.0, 0.0]), torch.zeros(1)]
    got = formulas.token_weights(masks, rule, denominator)
    for own, expected in zip(got, want, strict=True):
        torch.testing.assert_close(own, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("family", MEDIA_FAMILIES)
def test_embeddings_put_together_by_hand_are_hfs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for sampled placeholders gives HF's own hidden states where nothing was sampled."""
    reference = Reference(f"tiny:{family}", dtype=torch.float64)
    (sample,) = (s for s in default_samples(reference) if len(s.media) == 4)
    with torch.no_grad():
        want = hidden_with_media(reference.model, sample, reference.media)
        counts = reference.media.visual_tokens
        monkeypatch.setattr(reference.media, "visual_tokens", lambda item: [n + 1 for n in counts(item)])
        got = hidden_with_media(reference.model, sample, reference.media)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_picture_reaches_the_log_probs() -> None:
    """Control: another picture, other log-probs."""
    reference = Reference("tiny:qwen3_vl", dtype=torch.float64)
    sample = next(s for s in default_samples(reference) if len(s.media) == 1 and s.media[0].size()[1] == 24)
    other = Sample(sample.input_ids, sample.target_ids, sample.mask, media=[Image(sample.media[0].source[::-1].copy())])
    with torch.no_grad():
        first, second = (reference.outputs(s).logprob for s in (sample, other))
    assert (first - second).abs().max() > 1e-4


def test_default_samples_are_hard() -> None:
    """Ragged, holes, a row without a trained token, rows of 1 and 3; images in several rows, one row with videos too."""
    reference = Reference("tiny:qwen3_vl", dtype=torch.float64)
    samples = fill_fields(default_samples(reference), reference)
    lengths = [len(sample) for sample in samples]
    assert len(set(lengths)) == len(lengths) and {1, 3} <= set(lengths)
    assert any(sample.num_trained == 0 for sample in samples)
    assert any(bool((sample.mask.diff() != 0).sum() > 2) for sample in samples)
    assert [len(sample.media) for sample in samples] == [1, 0, 4, 0, 1, 0]
    placeholders = [int(torch.isin(sample.input_ids, torch.tensor([93, 94])).sum()) for sample in samples]
    wanted = [sum(sum(reference.media.visual_tokens(m)) for m in sample.media) for sample in samples]
    assert [p - w for p, w in zip(placeholders, wanted, strict=True)] == [0, 0, 0, 3, 3, 0], "sampled placeholders"


def test_old_logprobs_stand_off_the_clip_edges() -> None:
    """F: near an edge rounding alone flips a token; on both sides of every edge there are tokens."""
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    samples = fill_fields(default_samples(reference), reference)
    ratios: list[Tensor] = []
    with torch.no_grad():
        for sample in samples:
            kept = sample.mask > 0
            ratios.append((reference.outputs(sample).logprob - sample.fields["old_logprob"])[kept].exp())
    everything = torch.cat(ratios)
    for edge in (0.8, 1.2, 1.25, 3.0):
        assert (everything - edge).abs().min() > 0.02
        assert 0 < (everything > edge).sum() < len(everything)


def test_routers_over_the_batch_are_the_formula_on_all_its_tokens() -> None:
    """The oracle adds parts up sample by sample; here every token that counts stands in one table of logits."""
    reference = Reference("tiny:qwen3_moe", dtype=torch.float64)
    samples = default_samples(reference, (9, 4, 12, 7, 6, 5))  # the last trains nothing: its tokens count nowhere
    samples = [Sample(s.input_ids, s.target_ids, s.mask, {"advantage": torch.zeros(len(s))}) for s in samples]
    settings = {"moe_aux": 0.7, "moe_z": 0.3, "moe_over": "batch"}
    got = reference.run(samples, Case("batch", "reinforce", settings, "sum"))
    whole = RouterLog(reference.model)
    seen = []
    for sample in samples[:5]:
        with RouterLog(reference.model) as log:
            reference.outputs(sample)
        seen.append(log.seen)
    whole.seen = [tuple(torch.cat(part) for part in zip(*layer, strict=True)) for layer in zip(*seen, strict=True)]
    weight = sum(float(sample.mask.sum()) for sample in samples)
    want = {name: weight * term for name, term in whole.losses().items()}
    reference.clear()
    (0.7 * want["moe_aux"] + 0.3 * want["moe_z"]).backward()
    for name, term in want.items():
        assert got.metrics[f"loss/{name}"] == pytest.approx(term.item(), rel=1e-12)
    for name, gradient in reference.gradients().items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    alone = reference.run(samples, Case("sample", "reinforce", {"moe_aux": 0.7}, "sum"))
    assert abs(alone.metrics["loss/moe_aux"] - got.metrics["loss/moe_aux"]) > 1e-3, (
        "control: per sample is another number"
    )


def test_a_teacher_equal_to_the_student_has_no_kl() -> None:
    """Both directions are 0 with the same weights, above 0 with others, and unlike each other."""
    reference, other = (Reference("tiny:qwen3", dtype=torch.float64, seed=seed) for seed in (0, 1))
    samples = default_samples(reference, (9, 4))
    for case in TEACHER:
        same, found = (reference.run(samples, case, teacher) for teacher in (reference, other))
        assert abs(same.metrics["loss/distill_full"]) < 1e-14 < 1e-3 < found.metrics["loss/distill_full"]
    totals = [reference.run(samples, replace(case, normalise="token"), other).metrics["loss/total"] for case in TEACHER]
    assert abs(totals[0] - totals[1]) > 1e-4


def test_every_loss_alone_has_a_case() -> None:
    """Each main loss, each extra term, each rule: a term that is wrong alone cannot hide in a sum."""
    cases = default_cases(value_head=True, moe=True, teacher=True)
    assert {case.loss for case in cases} == set(formulas.LOSSES)
    assert {case.normalise for case in cases} == {"token", "sample", "sample_sum", "constant", "sum"}
    settings = {name for case in cases for name in case.settings}
    assert {"kl", "entropy", "value", "moe_aux", "moe_z"} <= settings
    assert len({case.name for case in cases}) == len(cases)
