"""The token budget, said in every unit a user may have meant.

A budget "per micro-step" is ambiguous: of a rank, of the group that shares a row, or of all ranks. The setting is
`max_tokens_per_rank`; the start log states all three as resolved numbers, in a form that a test (and grep) can parse.
"""

__all__ = ["budget_lines"]


def budget_lines(max_tokens_per_rank: int, *, dp: int, cp: int, mixer: str) -> list[str]:
    """Lines `tokens/micro_step/<unit> = N`: per rank, per CP group (the longest sample that fits), over all ranks."""
    group, total = max_tokens_per_rank * cp, max_tokens_per_rank * cp * dp
    return [
        f"tokens/micro_step/rank = {max_tokens_per_rank}  (setting max_tokens_per_rank)",
        f"tokens/micro_step/group = {group}  (x cp={cp} {mixer}: the longest sample that fits)",
        f"tokens/micro_step/all = {total}  (x dp={dp}: at most this many tokens meet the model at once)",
    ]
