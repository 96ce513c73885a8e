"""The fsdp backend: PyTorch FSDP2 over dp x cp with Hugging Face modules. Read policy.py, then backend.py."""

from longspan.engine.fsdp.backend import FSDPBackend

__all__ = ["FSDPBackend"]
