"""A run's certificate: the record of a short check from inside its ranks."""

from longspan.engine import EngineConfig
from longspan.launch import launch
from longspan.layout import Layout
from longspan.parity.certificate import certify

CONFIG = EngineConfig(
    model="tiny:qwen3_vl", layout=Layout(cp=2, mixer="ulysses"), dtype="bfloat16", freeze=("vision",), seed=3
)


def _certify() -> dict[str, object]:
    return certify(CONFIG)


def test_a_run_certifies_itself() -> None:
    """A bf16 run is certified in fp32, in full width; every rank has the same record."""
    first, second = launch(_certify, ranks=2, timeout_s=60, device="cpu")
    assert first == second
    assert first["passed"], first["misses"]
    assert (first["layout"], first["dtype"], first["model"]) == ("cp2-ulysses", "float32", "tiny:qwen3_vl")
    assert {"vision", "merger", "language", "embeddings"} <= set(first["worst_gradient"])
    assert all(part["figure"] < 1e-5 for part in first["worst_gradient"].values())
    assert first["worst_logprob"]["figure"] < 1e-5 and first["n_calls"]["figure"] < 1e-5
    assert first["leak_probe"]["figure"] == 0.0 and first["ranks_agree"]["figure"] == 0.0
    assert len(first["model_hash"]) == 40 and "torch" in first["versions"]
