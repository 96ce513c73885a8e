"""The samples a parity check runs on by default: ragged, with holes, with rows that broke other engines.

Lengths 13, 1, 40, 7, 29, 3 unless given; a third of each row is prompt, a fifth of the rest is masked at random, one
row trains nothing, rows of 1 and 3 tokens are shorter than a CP group. With a vision tower: images of different grids
laid over the middle and the fifths of their rows (where shards are cut), several in one row with two videos between
them (timestamps are text between the frame groups), rows without, and one row whose policy sampled the image
placeholder itself. `fill_fields` adds what every loss reads; old log-probs stay
away from the clip edges, where rounding alone would flip tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.data import Image, Sample, Video
from longspan.errors import UserError
from longspan.parity.reference import Reference

LENGTHS = (13, 1, 40, 7, 29, 3)
TOP_K = 3
# log-ratio of new to old log-probs: well inside or outside [log 0.8, log 1.25] and the dual clip at log 3
LEVELS = (-0.5, 0.0, 0.45, 1.4)
JITTER = 0.05
EDGES = (-0.2232, 0.1823, 0.2232, 1.0986)  # log of 0.8, 1.2, 1.25, 3
MARGIN = 0.02  # distance of a sample's mean log-ratio (gspo) from every edge


def default_samples(reference: Reference, lengths: Sequence[int] | None = None, seed: int = 1) -> list[Sample]:
    """Samples without fields; `lengths` are text tokens, images come on top where they do not fit."""
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise UserError(f"lengths {list(lengths)} must be positive numbers of tokens, for example 13,1,40")
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(lengths or LENGTHS):
        tokens, media, sampled = _tokens(reference, number, length, generator)
        made.append(_sample(reference, number, tokens, media, sampled, generator))
    return made


def _tokens(
    reference: Reference, number: int, length: int, generator: torch.Generator
) -> tuple[Tensor, list[Image | Video], list[int]]:
    """length + 1 ids, the media, and the places where the policy sampled a placeholder."""
    text = text_ids(reference)
    tokens = text[torch.randint(0, len(text), (length + 1,), generator=generator)]
    if reference.media.vision is None:
        return tokens, [], []
    factor = reference.media.vision.patch_size * reference.media.vision.spatial_merge_size
    mixed = [(1, 2, 3), (3, 1, 2), (2, 2, 1), (1, 1, 4)]
    shapes = {0: [(1, 2, 3)], 2: mixed, 4: [(1, 3, 2)]}.get(number % 6, [])  # frames, rows and columns of tokens
    media = [_media(frames, height * factor, width * factor, generator) for frames, height, width in shapes]
    runs = [_run(reference, item, generator) for item in media]
    place = length // (len(runs) + 1)
    pieces = []
    for index, run in enumerate(runs):  # centred on the cuts into len(runs) + 1 parts
        end = max((index + 1) * place - sum(map(len, pieces)) - len(run) // 2, 1)
        text, tokens = tokens[:end], tokens[end:]
        pieces += [text, run]
    keep = max(length + 1 - sum(map(len, pieces)), 4)
    tokens = torch.cat([*pieces, tokens[:keep]])
    sampled = []
    if number % 6 in (3, 4) and length >= 6:  # once, and a run of two: in a row without images and in one with an image
        sampled = [len(tokens) - 5, len(tokens) - 3, len(tokens) - 2]
        tokens[sampled] = reference.media.image_id
    return tokens, media, sampled


def special_ids(reference: Reference) -> list[int]:
    """Placeholders and vision markers, wherever in the vocabulary they stand."""
    if reference.media.vision is None:
        return []
    config = reference.model.config
    return [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]


def text_ids(reference: Reference) -> Tensor:
    """All other ids, ascending."""
    ids = torch.arange(reference.model.config.get_text_config().vocab_size)
    return ids[~torch.isin(ids, torch.tensor(special_ids(reference), dtype=torch.int64))]


def _run(reference: Reference, media: Image | Video, generator: torch.Generator) -> Tensor:
    """Placeholders between their markers; before each frame group of a video two ids of text, its timestamp."""
    config, groups = reference.model.config, reference.media.visual_tokens(media)
    text = text_ids(reference)
    pieces: list[int] = []
    for length in groups:
        if isinstance(media, Video):
            pieces += text[torch.randint(0, len(text), (2,), generator=generator)].tolist()
        mark = config.video_token_id if isinstance(media, Video) else config.image_token_id
        pieces += [config.vision_start_token_id, *[mark] * length, config.vision_end_token_id]
    return torch.tensor(pieces)


def _media(frames: int, height: int, width: int, generator: torch.Generator) -> Image | Video:
    """An image; with more than one frame, a video with half a second between frames."""
    pixels = torch.randint(0, 256, (frames, height, width, 3), generator=generator, dtype=torch.uint8).numpy()
    return Image(pixels[0]) if frames == 1 else Video(pixels, timestamps=tuple(0.5 * n for n in range(frames)))


def _sample(
    reference: Reference,
    number: int,
    tokens: Tensor,
    media: list[Image | Video],
    sampled: list[int],
    generator: torch.Generator,
) -> Sample:
    """Shift once, on the whole trajectory; mask the prompt, media, and random holes."""
    length = len(tokens) - 1
    mask = (torch.arange(length) >= length // 3) & (torch.rand(length, generator=generator) > 0.2)
    mask[-1] = True
    targets = tokens[1:].clone()
    if reference.media.vision is not None:
        special = torch.zeros(length, dtype=torch.bool)
        special[torch.isin(targets, torch.tensor([reference.media.image_id, reference.media.video_id]))] = True
        mask &= ~special
        for place in sampled:
            mask[place - 1] = True  # sampled by the policy: trained on
    if number % 6 == 5:
        mask[:] = False  # a row that trains nothing
    if number % 6 == 4:
        mask[-1], targets[-1] = False, -100  # a trajectory whose last token predicts nothing
    return Sample(tokens[:-1], targets, mask, media=media, group=f"prompt {number // 2}")


def fill_fields(samples: Sequence[Sample], reference: Reference, seed: int = 2) -> list[Sample]:
    """The same samples with every field that a loss reads; fields that a sample already has are kept."""
    rng = np.random.default_rng(seed)
    filled = []
    for number, sample in enumerate(samples):
        length = len(sample)
        fields: dict[str, Tensor] = {}
        if number % 2:
            fields["temperature"] = torch.linspace(0.7, 1.3, length, dtype=torch.float64)
        fields |= {
            "advantage": _away_from_zero(rng, length),
            "return": torch.tensor(rng.normal(size=length)),
            "old_value": torch.tensor(rng.normal(size=length)),
        }
        fields |= _teacher(rng, length, reference)
        fields |= sample.fields
        with torch.no_grad():
            own = reference.outputs(_with(sample, fields)).logprob.double()
        fields.setdefault("ref_logprob", own + torch.tensor(rng.normal(scale=0.3, size=length)))
        fields.setdefault("old_logprob", own - _log_ratios(rng, sample.mask))
        filled.append(_with(sample, fields))
    return filled


def with_routes(sample: Sample, reference: Reference) -> Sample:
    """The same sample with the experts that the oracle's routers choose, as the engine would record them."""
    return _with(sample, {**sample.fields, "routed_experts": reference.routes(sample)})


def _with(sample: Sample, fields: dict[str, Tensor]) -> Sample:
    return Sample(
        sample.input_ids,
        sample.target_ids,
        sample.mask,
        fields=fields,
        media=sample.media,
        group=sample.group,
        adapter=sample.adapter,
    )


def _away_from_zero(rng: np.random.Generator, length: int) -> Tensor:
    return torch.tensor(rng.choice([-1.0, 1.0], length) * rng.uniform(0.3, 1.5, length))


def _log_ratios(rng: np.random.Generator, mask: Tensor) -> Tensor:
    """[L] log-ratios: most tokens near the sample's own level, some at others, the mean over trained tokens off every
    edge.
    """
    trained = mask.numpy() > 0
    while True:
        own = rng.choice(LEVELS[:3])
        levels = np.where(rng.random(len(mask)) < 0.7, own, rng.choice(LEVELS, len(mask)))
        ratios = levels + rng.uniform(-JITTER, JITTER, len(mask))
        mean = ratios[trained].mean() if trained.any() else 0.0
        if min(abs(mean - edge) for edge in EDGES) > MARGIN:
            return torch.tensor(ratios)


def _teacher(rng: np.random.Generator, length: int, reference: Reference) -> dict[str, Tensor]:
    """Top-k ids and log-probs of a made-up teacher."""
    vocabulary = reference.model.config.get_text_config().vocab_size
    ids = np.stack([rng.choice(vocabulary, TOP_K, replace=False) for _ in range(length)])
    logprob = np.log(rng.dirichlet(np.ones(TOP_K + 1), length)[:, :TOP_K] + 1e-3)
    return {"teacher_ids": torch.tensor(ids), "teacher_logprob": torch.tensor(logprob)}
