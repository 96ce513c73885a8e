"""Shared by all tests: one thread a process, and a fork server that is warm before the first clock starts."""

import pytest
import torch

from longspan.launch import PRELOAD, launch

MEGATRON = "longspan.engine.megatron.upstream"  # 8 s of a core in every rank that imports it by itself


def pytest_configure():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def fork_server(request):
    """Start the server where any collected test launches ranks; it imports torch and transformers once (10 to 20 s), and
    megatron-core where a test of that backend is collected."""
    if any("megatron" in item.path.name or item.path.name == "test_large.py" for item in request.session.items):
        PRELOAD.append(MEGATRON)
    if any({"dist", "parity", "e2e", "cases", "peers"} & set(item.path.parts) for item in request.session.items):
        launch(int, ranks=1, timeout_s=300)
