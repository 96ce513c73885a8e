"""What a run tells: metrics, progress, phases with time and memory, plots, the report, where it came from.

A leaf: it imports nothing of the package but errors, knows no ranks and no collectives. Only rank 0 makes these
objects. `metrics.jsonl` is the record; TensorBoard and W&B get copies; `report.html` is made from the files of the
run folder alone.
"""

from longspan.observe.budget import budget_lines
from longspan.observe.memory import peak_gib
from longspan.observe.metrics import MetricsWriter, append_jsonl, keep_until, read_jsonl
from longspan.observe.phases import Phases
from longspan.observe.progress import Progress
from longspan.observe.provenance import provenance
from longspan.observe.report import write_report
from longspan.observe.writable import check_makeable, check_writable

__all__ = [
    "MetricsWriter",
    "Phases",
    "Progress",
    "append_jsonl",
    "budget_lines",
    "check_makeable",
    "check_writable",
    "keep_until",
    "peak_gib",
    "provenance",
    "read_jsonl",
    "write_report",
]
