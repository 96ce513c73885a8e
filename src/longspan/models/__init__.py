"""What the engine knows of model families: adapters, loading, media and the vision tower's share of a row."""

from longspan.models.adapter import Adapter, Context, Family, read_samples
from longspan.models.loading import FAMILIES, adapt, load_model
from longspan.models.tiny import TINY, tiny
from longspan.models.vision import MediaPlan, MediaShard, media_shard, offset_media_rows, plan_media

__all__ = [
    "Adapter",
    "Context",
    "Family",
    "read_samples",
    "FAMILIES",
    "adapt",
    "load_model",
    "TINY",
    "tiny",
    "MediaPlan",
    "MediaShard",
    "media_shard",
    "offset_media_rows",
    "plan_media",
]
