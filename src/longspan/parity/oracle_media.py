"""Images and videos for the oracle: Hugging Face's own processor for pixels, Hugging Face's own multimodal forward
for the rest.

The one case that forward cannot take is a policy that sampled a placeholder id itself (bugs G7): then embeddings and
positions are put together here, image by image, from HF's own tower and rope index. Videos: HF's video processor
needs torchvision, so frames are resized with PIL, scaled by HF's image processor and cut into patches by plain loops
in the documented order.
"""

from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from longspan.data import Image, Sample, Video

PREPROCESSOR = "preprocessor_config.json"
MAX_TOKENS = 16384  # Qwen3-VL's own limit an image, where no preprocessor file says otherwise


class MediaInputs:
    """Pixels and grids of a sample as HF's forward wants them. Without a vision tower there is nothing to make."""

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        self.vision = config.vision_config if "vision_config" in config.sub_configs else None
        if self.vision is None:
            return
        self.image_id, self.video_id = config.image_token_id, config.video_token_id
        folder = Path(name)
        if name.startswith("tiny:") or (folder.is_dir() and not (folder / PREPROCESSOR).exists()):
            area = (self.vision.patch_size * self.vision.spatial_merge_size) ** 2
            self.processor = Qwen2VLImageProcessorPil(
                patch_size=self.vision.patch_size,
                merge_size=self.vision.spatial_merge_size,
                temporal_patch_size=self.vision.temporal_patch_size,
                size={"shortest_edge": area, "longest_edge": MAX_TOKENS * area},
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            )
        else:
            self.processor = Qwen2VLImageProcessorPil.from_pretrained(name)

    def tensors(self, sample: Sample) -> dict[str, Tensor]:
        """pixel_values [P, C], image_grid_thw [n, 3] and their video counterparts; empty for a text sample."""
        images = [item for item in sample.media if isinstance(item, Image)]
        videos = [item for item in sample.media if isinstance(item, Video)]
        found = {}
        if images:
            made = self.processor(images=[image.load() for image in images], return_tensors="pt")
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
        made = self.processor(images=[media.load()], return_tensors="pt")["image_grid_thw"][0]
        return tuple(made.tolist())

    def visual_tokens(self, media: Image | Video) -> list[int]:
        """Length of each placeholder run: one an image, one a frame group of a video."""
        frames, height, width = self.grid(media)
        return [height * width // self.vision.spatial_merge_size**2] * frames

    def _video(self, video: Video) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches [t*h*w, C] in the order (t, h/m, w/m, m, m) x (channel, frame, row, column), and the grid."""
        vision, processor = self.vision, self.processor
        patch, merge, temporal = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        frames = video.load()
        area = (patch * merge) ** 2
        height, width = smart_resize(*frames.shape[1:3], patch * merge, area, MAX_TOKENS * area)
        resized = [np.asarray(PIL.Image.fromarray(f).resize((width, height), processor.resample)) for f in frames]
        while len(resized) % temporal:
            resized.append(resized[-1])
        scaled = [processor.rescale(f.transpose(2, 0, 1), processor.rescale_factor) for f in resized]  # fp32, as images
        normed = [processor.normalize(f, processor.image_mean, processor.image_std) for f in scaled]
        video_array = np.stack(normed).transpose(0, 2, 3, 1)  # [F, H, W, 3]
        patches = []
        for t in range(len(resized) // temporal):
            for row in range(height // patch // merge):
                for column in range(width // patch // merge):
                    for y in range(row * merge, (row + 1) * merge):
                        for x in range(column * merge, (column + 1) * merge):
                            block = video_array[t * temporal : (t + 1) * temporal, y * patch : (y + 1) * patch]
                            block = block[:, :, x * patch : (x + 1) * patch]  # [temporal, patch, patch, 3]
                            patches.append(block.transpose(3, 0, 1, 2).reshape(-1))
        grid = (len(resized) // temporal, height // patch, width // patch)
        return torch.tensor(np.stack(patches), dtype=torch.float32), grid


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
