"""Time of a sample at a CP size."""

import numpy as np


class CostModel:
    step_s = 0.0

    def __call__(self, length: int, size: int) -> float:
        raise NotImplementedError

    def times(self, lengths: np.ndarray, size: int) -> np.ndarray:
        raise NotImplementedError
