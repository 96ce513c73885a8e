"""6. The engine: the conductor and its backends. Read engine.py first."""

from longspan.engine.config import EngineConfig
from longspan.engine.engine import Engine
from longspan.engine.optim import SGD, AdamW
from longspan.engine.outputs import Outputs

__all__ = ["SGD", "AdamW", "Engine", "EngineConfig", "Outputs"]
