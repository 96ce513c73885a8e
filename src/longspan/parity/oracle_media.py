"""Images and videos for the oracle: Hugging Face's own processors for pixels, Hugging Face's own multimodal forward
for the rest.

The one case that forward cannot take is a policy that sampled a placeholder id itself (bugs G7): then embeddings and
positions are put together here, image by image, from HF's own tower and rope index. Videos: HF's video processor
finds its settings, its size and its patches itself; what it asks of torchvision is done with PIL and numpy here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.image_transforms import normalize, rescale
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from longspan.data import Image, Sample, Video

MAX_TOKENS = 16384  # an image or video, where there is no preprocessor file
FIRST = ChannelDimension.FIRST


def picture(image: Image) -> PIL.Image.Image:
    """RGB, as PIL itself reads an open file (by path it maps TIFFs into memory unturned) or has an image in memory, turned
    upright."""
    source, loaded = image.source, image.load()  # what cannot be read is refused here
    if isinstance(source, np.ndarray | Tensor):
        return loaded
    if isinstance(source, PIL.Image.Image):
        return PIL.ImageOps.exif_transpose(source).convert("RGB")
    with open(source, "rb") as file, PIL.Image.open(file) as opened:
        return PIL.ImageOps.exif_transpose(opened).convert("RGB")


def pictures(video: Video) -> np.ndarray:
    """[F, H, W, 3] uint8."""
    loaded = video.load()  # frames of several sizes are refused here
    if isinstance(video.source, np.ndarray | Tensor):
        return loaded
    return np.stack([np.asarray(picture(frame)) for frame in video.frames()])


class PilFrames(BaseVideoProcessor):
    """The three steps of HF's video processor that call torchvision, on stacked videos [B, F, 3, H, W]."""

    def convert_to_rgb(self, video: Tensor) -> Tensor:
        return video  # `pictures` are RGB

    def resize(self, image: Tensor, size: SizeDict, resample: int) -> Tensor:
        frames = [PIL.Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in image.flatten(0, 1)]
        resized = np.stack([np.asarray(frame.resize((size.width, size.height), resample)) for frame in frames])
        return torch.from_numpy(resized).permute(0, 3, 1, 2).unflatten(0, image.shape[:2])

    def rescale_and_normalize(
        self,
        images: Tensor,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: float | tuple[float, ...],
        image_std: float | tuple[float, ...],
    ) -> Tensor:
        """First the one, then the other, in fp32, as HF's PIL processor treats an image."""
        scaled = []
        for frame in images.flatten(0, 1).numpy():
            if do_rescale:
                frame = rescale(frame, rescale_factor, data_format=FIRST, input_data_format=FIRST)
            if do_normalize:
                frame = normalize(frame, image_mean, image_std, data_format=FIRST, input_data_format=FIRST)
            scaled.append(frame)
        return torch.from_numpy(np.stack(scaled)).float().unflatten(0, images.shape[:2])


class PilVideoProcessor(Qwen3VLVideoProcessor, PilFrames):
    """HF's video processor, whose calls of its base class are PilFrames'."""


def processors(name: str, vision: PretrainedConfig) -> tuple[Qwen2VLImageProcessorPil, PilVideoProcessor]:
    """HF's processors as they load themselves from a folder or hub id, with the model's sizes where the file has none.
    Nothing to load: 1 to MAX_TOKENS tokens and the range -1..1.
    """
    sizes = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    token = (vision.patch_size * vision.spatial_merge_size) ** 2
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = _loaded(name, Qwen2VLImageProcessorPil.get_image_processor_dict)
    if image is None:
        image = half | {"size": {"shortest_edge": token, "longest_edge": MAX_TOKENS * token}}
    elif image.get("size") is None:
        image["size"] = dict(Qwen2VLImageProcessorPil.size)  # a copy: HF writes min_pixels into the class's own
    video = _loaded(name, Qwen3VLVideoProcessor.get_video_processor_dict)
    if video is None:
        group = token * vision.temporal_patch_size
        video = half | {"size": {"shortest_edge": group, "longest_edge": MAX_TOKENS * group}}
    return Qwen2VLImageProcessorPil(**sizes | image), PilVideoProcessor(**sizes | video)


def _loaded(name: str, load: Callable[[str], tuple[dict[str, Any], Any]]) -> dict[str, Any] | None:
    """What HF's processor finds; None: a tiny model, or a folder without a file for it."""
    if name.startswith("tiny:"):
        return None
    try:
        return load(name)[0]
    except OSError:
        if Path(name).is_dir():
            return None
        raise


class MediaInputs:
    """Pixels and grids of a sample as HF's forward wants them. Without a vision tower there is nothing to make."""

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self.vision = config.vision_config if "vision_config" in config.sub_configs else None
        if self.vision is None:
            return
        self.image_id, self.video_id = config.image_token_id, config.video_token_id
        self.processor, self.video_processor = processors(name, self.vision)

    def tensors(self, sample: Sample) -> dict[str, Tensor]:
        """pixel_values [P, C], image_grid_thw [n, 3] and their video counterparts; empty for a text sample."""
        images = [item for item in sample.media if isinstance(item, Image)]
        videos = [item for item in sample.media if isinstance(item, Video)]
        found = {}
        if images:
            made = self.processor(images=[picture(image) for image in images], return_tensors="pt")
            found |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        if videos:
            cut = [self._video(video) for video in videos]
            found |= {
                "pixel_values_videos": torch.cat([pixels for pixels, _ in cut]),
                "video_grid_thw": torch.tensor([grid for _, grid in cut]),
            }
        return found

    def grid(self, media: Image | Video) -> tuple[int, int, int]:
        """(t, h, w) in patches."""
        if isinstance(media, Video):
            return self._video(media)[1]
        made = self.processor(images=[picture(media)], return_tensors="pt")["image_grid_thw"][0]
        return tuple(made.tolist())

    def visual_tokens(self, media: Image | Video) -> list[int]:
        """Length of each placeholder run: one an image, one a frame group of a video."""
        frames, height, width = self.grid(media)
        return [height * width // self.vision.spatial_merge_size**2] * frames

    def _video(self, video: Video) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches [t*h*w, C] and the grid. A video shorter than a frame group, which HF refuses, rests on its last
        frame."""
        frames = torch.from_numpy(pictures(video)).permute(0, 3, 1, 2)
        while len(frames) < self.vision.temporal_patch_size:
            frames = torch.cat([frames, frames[-1:]])
        cap = bool(self.video_processor.cap_pixels_per_frame)  # said aloud, or HF warns
        made = self.video_processor(
            videos=[frames], do_sample_frames=False, cap_pixels_per_frame=cap, return_tensors="pt"
        )
        return made["pixel_values_videos"], tuple(made["video_grid_thw"][0].tolist())


def hidden_with_media(model: PreTrainedModel, sample: Sample, media: MediaInputs) -> Tensor:
    """[L, E] after the final norm, from HF's own forward of one unpacked sample."""
    ids = sample.input_ids[None]
    if not sample.media:
        return model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state[0]
    tensors = {name: tensor.to(model.device) for name, tensor in media.tensors(sample).items()}
    is_media = (sample.input_ids == media.image_id) | (sample.input_ids == media.video_id)
    wanted = sum(sum(media.visual_tokens(item)) for item in sample.media)
    if int(is_media.sum()) == wanted:
        types = _types(sample.input_ids, is_media, media)
        types = types[None].to(model.device)
        out = model.base_model(input_ids=ids.to(model.device), mm_token_type_ids=types, use_cache=False, **tensors)
        return out.last_hidden_state[0]
    sampled = torch.cat(
        [torch.zeros(1, dtype=torch.bool), sample.mask[:-1] > 0]
    )  # token t is sampled if t - 1 is trained on it
    return _hidden_by_hand(model, sample.input_ids, is_media & ~sampled, media, tensors)


def _types(ids: Tensor, is_media: Tensor, media: MediaInputs) -> Tensor:
    """[L] 0 text, 1 image, 2 video."""
    return torch.where(is_media, torch.where(ids == media.video_id, 2, 1), 0)


def _hidden_by_hand(
    model: PreTrainedModel, ids: Tensor, is_media: Tensor, media: MediaInputs, tensors: dict[str, Tensor]
) -> Tensor:
    """Features only at `is_media` [L]; any other placeholder id is a word, with its own embedding and a text
    position.
    """
    base, device = model.base_model, model.device
    grids = {name: tensors.get(f"{name}_grid_thw") for name in ("image", "video")}
    types, is_media = _types(ids, is_media, media).to(device), is_media.to(device)
    ids = ids.to(device)
    positions, _ = base.get_rope_index(
        ids[None], types[None], image_grid_thw=grids["image"], video_grid_thw=grids["video"]
    )
    embeds = base.get_input_embeddings()(ids)  # [L, E]
    deepstack: list[Tensor] = []
    for kind, name in ((1, "pixel_values"), (2, "pixel_values_videos")):
        if name not in tensors:
            continue
        out = base.get_image_features(tensors[name], grids["image" if kind == 1 else "video"], return_dict=True)
        places = (types == kind).nonzero()[:, 0]
        embeds = embeds.index_copy(0, places, torch.cat(list(out.pooler_output)).to(embeds.dtype))
        for depth, features in enumerate(out.get("deepstack_features") or []):  # Qwen3.5's tower has none
            if len(deepstack) <= depth:
                deepstack.append(features.new_zeros(len(types), features.shape[1]))
            deepstack[depth] = deepstack[depth].index_copy(0, places, features)
    out = base.language_model(
        inputs_embeds=embeds[None],
        position_ids=positions,
        visual_pos_masks=is_media[None],
        deepstack_visual_embeds=[features[is_media] for features in deepstack],
        use_cache=False,
    )
    return out.last_hidden_state[0]
