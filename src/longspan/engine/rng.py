"""The random state of a rank: Python, NumPy, torch on the CPU and on the device."""

import pickle
import random
from pathlib import Path

import numpy as np
import torch

__all__ = ["load", "save"]


def save(file: Path) -> None:
    """Write this rank's state."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    file.write_bytes(pickle.dumps(state))


def load(folder: Path, rank: int) -> None:
    """Restore the state that this rank saved. A rank that did not exist then keeps its own: no number depends on it."""
    file = folder / f"rng-{rank}.pt"
    if not file.is_file():
        return
    state = pickle.loads(file.read_bytes())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
