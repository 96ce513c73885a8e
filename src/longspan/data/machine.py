"""Machine: the constants of one kind of GPU, as JSON. `longspan bench --calibrate` writes such a file; H200's ships
here."""

import json
import reprlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from longspan.errors import UserError

MOST = 1e30  # of any constant
SHIPPED = Path(__file__).parent / "machines"


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates that a training step reaches, not the ceilings of the data sheet."""

    name: str
    memory_gib: float  # of one GPU
    node_ranks: int  # GPUs joined by the fast links
    matmul_flops: float  # of a decoder layer's matmuls, norms and activations included, compiled
    head_flops: float  # of the chunked fp32-logit head
    attention_flops: float  # forward and backward of one long causal document
    attention_half_length: float  # tokens of a document at which attention reaches half of it
    linear_token_s: float  # Gated DeltaNet kernel, forward + backward, seconds a token and value head of 128
    linear_state_share: float  # efficiency of the state-passing form at CP 2, less 0.1; falls with its inverse beyond
    vision_flops: float
    exchange_bytes_s: float  # of a mixer's collectives inside a node, a rank, not overlapped
    node_exchange_bytes_s: float  # between nodes, a rank
    gather_bytes_s: float  # FSDP's all-gather and reduce-scatter inside a node, a rank
    gather_overlap: float  # share of FSDP's traffic hidden behind compute
    launch_s: float  # host time of one layer's forward + backward, exposed once a micro-step
    latency_s: float  # of a small collective
    host_bytes_s: float  # between a GPU and pinned host memory, one way

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "name":
                continue
            low, high = {"gather_overlap": (0.0, 1.0), "node_ranks": (1, MOST)}.get(name, (1e-15, MOST))
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise UserError(
                    f"machine {self.name!r}: {name} is {reprlib.repr(value)}; it is a number from {low:g} to {high:g}."
                )

    @staticmethod
    def load(name_or_path: str | Path) -> "Machine":
        """A shipped machine by name ("h200"), or a JSON file."""
        path = Path(name_or_path)
        if path.suffix != ".json":
            path = SHIPPED / f"{str(name_or_path).lower()}.json"
        if not path.is_file():
            known = sorted(item.stem for item in SHIPPED.glob("*.json"))
            raise UserError(
                f"no machine constants {path}. Shipped: {known}; `longspan bench --calibrate FILE.json` measures yours."
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits; too deep
            raise UserError(f"machine file {path} is not JSON: {error}.") from None
        if not isinstance(values, dict):
            raise UserError(f"machine file {path} holds a {type(values).__name__}, not an object of constants.")
        names = {item.name for item in fields(Machine)}
        wrong, missing = sorted(set(values) - names), sorted(names - set(values))
        if wrong or missing:
            raise UserError(
                f"machine file {path}: unknown names {wrong}, missing names {missing}. See {SHIPPED}/h200.json."
            )
        return Machine(**values)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
