"""Samples, plans and streams: CPU only, knows no ranks. Read sample.py, plan.py, planner.py, pack.py in this order."""

from longspan.data.media import Image, Video
from longspan.data.pack import FieldSpec, Stream, pack
from longspan.data.plan import (
    Limits,
    Plan,
    Row,
    fullest_row,
    lower_bound,
    makespan,
    padded_length,
    row_times,
    row_tokens,
)
from longspan.data.planner import check_fit, make_plan
from longspan.data.sample import Sample, check_samples, joined_ids

__all__ = [
    "Image", "Video", "Sample", "check_fit", "check_samples", "joined_ids", "Limits", "Row", "Plan", "make_plan", "fullest_row", "lower_bound",
    "makespan", "padded_length", "row_times", "row_tokens", "FieldSpec", "Stream", "pack",
]  # fmt: skip
