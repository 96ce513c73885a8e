"""Proof that a layout changes no number. Read reference.py (the oracle), then checks.py, then compare.py."""

from longspan.parity.cells import Cell, Limits
from longspan.parity.compare import Request, compare
from longspan.parity.reference import Reference

__all__ = ["Cell", "Limits", "Reference", "Request", "compare"]
