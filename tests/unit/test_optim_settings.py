"""Settings of a step that would wreck or freeze the weights are refused where they enter."""

import math

import pytest

from longspan import SGD, AdamW
from longspan.errors import UserError


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {"lr": 1e300}),
        (AdamW, {"lr": 1e-3, "weight_decay": math.inf}),
        (AdamW, {"lr": 1e-3, "eps": math.inf}),
        (AdamW, {"lr": 1e-3, "betas": (0.9, 1.0)}),
        (AdamW, {"lr": math.nan}),
        (SGD, {"lr": 1e-3, "momentum": math.inf}),
        (SGD, {"lr": 1e-3, "weight_decay": math.nan}),
    ],
)
def test_refused_by_name(kind: type, settings: dict[str, object]) -> None:
    name = list(settings)[-1]
    with pytest.raises(UserError, match=name):
        kind(**settings)


def test_ordinary_settings_pass() -> None:
    AdamW(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    SGD(lr=10.0, momentum=0.9)
