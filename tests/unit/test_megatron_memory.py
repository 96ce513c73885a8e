"""What trains under the megatron backend is counted over the names that it builds, heads among them."""

import pytest

from longspan import EngineConfig
from longspan.data.stage_memory import Trained
from longspan.engine.memory_model import trained_of
from longspan.models.loading import load_model


@pytest.mark.parametrize(
    ("family", "settings", "trained"),
    [
        ("qwen3", {"freeze": ("value_head.*",), "value_head": True}, Trained(vision=0.0)),
        ("qwen3_5_moe_mtp", {"freeze": ("mtp.*",), "mtp_steps": 1}, Trained(vision=0.0)),
        (
            "qwen3",
            {"freeze": ("language", "embeddings"), "value_head": True},
            Trained(layers=0.0, embeddings=False, vision=0.0),
        ),
    ],
)
def test_frozen_heads_and_heads_that_train_alone_are_counted(family, settings, trained):
    adapter, _ = load_model(f"tiny:{family}")
    assert trained_of(EngineConfig(f"tiny:{family}", backend="megatron", **settings), adapter) == trained
