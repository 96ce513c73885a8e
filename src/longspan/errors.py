"""The error tree. Every message names the value, the rule it broke and the way out.

Raised at the boundary, once; inside the package an `assert` marks our own bugs only.
"""


class LongspanError(Exception):
    """Root of everything this package raises on purpose."""


class UserError(LongspanError, ValueError):
    """Bad input: a sample, a setting or a combination of settings that cannot be honoured."""


class CheckpointError(UserError):
    """A checkpoint is missing, corrupt or made for something else; nothing was loaded."""


class OutOfMemory(LongspanError, RuntimeError):
    """The device ran out of memory: names the phase, the peak, the largest samples and the setting that would fit."""


class RankError(LongspanError, RuntimeError):
    """A rank failed, hung or disagreed with the others: names the rank that did so first."""


class RankLost(RankError):
    """A rank's process died or did not end in time: nothing is known of its numbers."""
