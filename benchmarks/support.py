"""The support matrix: every tiny family under every kind of layout, put through the checks of `longspan parity`.

    python benchmarks/support.py --jobs 5 --out FILE [--models a,b] [--layouts x,y] [--budget 460]    run what FILE lacks
    python benchmarks/support.py --table FILE [--readme README.md]                                    render it

fp64, CPU, gloo, up to 4 ranks a cell; each family has a process of its own, at most `--jobs` at once. A cell holds
the worst figure of each check over all default cases and samples against plain Hugging Face on one unpacked sample,
or the message of a refusal. Finished cells are kept in FILE, so a run that was stopped goes on where it was;
`--fresh` forgets them. Families are named by their `tiny:` config.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from longspan.errors import LongspanError, RankError, UserError
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.models.tiny import TINY
from longspan.observe.provenance import provenance
from longspan.parity.cells import worst
from longspan.parity.checks import Plan, Truth, check_layout
from longspan.parity.compare import Request, brief, prepare, rank_cell
from longspan.parity.reference import Reference

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = re.compile(r"for \w+For(CausalLM|ConditionalGeneration)\.")
CAPTION = """\
fp64 on CPU over gloo, against plain `transformers` on one unpacked sample. A figure is the worst of every token's log-prob
(absolute), every parameter's gradient and its weight after 3 AdamW steps (relative L2) and every metric, over all losses and
rules of `longspan parity`; split calls, the leak probe and agreement of ranks hold wherever it is not bold. Blank: not run."""
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"
CHECKS = ("logprob", "gradient", "metrics", "calls", "leak", "weights", "ranks", "start")
SHOWN = ("logprob", "gradient", "metrics", "weights")  # of these a table shows the worst
MEGATRON = "megatron "  # prefix of a column

ALL = (
    "cp2-ulysses",
    "cp2-ring",
    "cp2-gather",
    "cp3-ulysses",
    "cp3-ring",
    "cp3-gather",
    "cp4-ulysses",
    "cp4-hybrid",
    "dp2-cp2",
)
RECURRENT = ("cp2-state", "cp2-heads")
EXPERTS = ("ep2", "cp2-ep2", "dp2-cp2-ep4")
OTHER_BACKEND = (MEGATRON + "tp2", MEGATRON + "tp2-cp2", MEGATRON + "pp2", MEGATRON + "pp3")
# not in megatron's weight table: one refusal is enough
UNTABLED = ("gemma3", "glm4", "ministral", "olmo2", "olmo3", "phi3", "smollm3", "gpt_oss")
MOE = (
    "qwen3_moe",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_mtp",
    "qwen3_5_vl_moe",
    "qwen3_next",
    "qwen3_next_mtp",
    "gpt_oss",
)
# Slowest first: the recurrence of their oracle runs token by token.
HYBRID = (
    "qwen3_5_vl",
    "qwen3_5_vl_mtp",
    "qwen3_5_moe",
    "qwen3_5_moe_mtp",
    "qwen3_5_vl_moe",
    "qwen3_next",
    "qwen3_next_mtp",
    "qwen3_5",
    "qwen3_5_mtp",
)
ORDER = (*HYBRID, *(name for name in TINY if name not in HYBRID))
ROWS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3", "glm4", "ministral", "olmo2", "olmo3", "phi3", "smollm3"),
    *("qwen3_moe", "gpt_oss", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_mtp", "qwen3_5_vl", "qwen3_5_vl_mtp"),
    *("qwen3_5_moe", "qwen3_5_moe_mtp", "qwen3_5_vl_moe", "qwen3_next", "qwen3_next_mtp"),
)

Cells = dict[str, dict[str, Any]]  # layout -> figures by check and "passed", or "refused" or "error" with a message


def columns(model: str) -> list[str]:
    """The layouts that a family is put through."""
    found = [*ALL]
    found += RECURRENT if model in HYBRID else ()
    found += EXPERTS if model in MOE else ()
    if model in UNTABLED:
        return [*found, OTHER_BACKEND[0]]
    stages = MEGATRON + ("pp3" if model in HYBRID else "pp2")  # must divide the layers: 3 in hybrid configs, else 2
    return [*found, *OTHER_BACKEND[:2], stages]


def run_family(model: str, names: Sequence[str], path: Path, commit: str) -> None:
    """Fill the missing cells of one family, writing the file after every launch; a cell says what it ran on."""
    torch.set_num_threads(1)
    cells: Cells = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = [name for name in names if not _settled(cells.get(name, {}))]
    if importlib.util.find_spec("megatron") is None:
        missing = [name for name in missing if not name.startswith(MEGATRON)]
    if not missing:
        return
    reference = Reference(f"tiny:{model}", dtype=torch.float64, value_head=True)
    plan, truth = prepare(Request(f"tiny:{model}", {}, device="cpu"), reference)
    with TemporaryDirectory(prefix="longspan-support-") as folder:
        stored = Path(folder) / "truth.pt"
        torch.save(truth, stored)
        for group in _groups(missing):
            made = _launch(plan, stored, group)
            cells |= {name: cell | {"on": f"{commit[:7]}, torch {torch.__version__}"} for name, cell in made.items()}
            path.write_text(json.dumps(cells, indent=1), encoding="utf-8")


def _settled(cell: Mapping[str, Any]) -> bool:
    """Misses and errors run again."""
    return "refused" in cell or bool(cell.get("passed"))


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Layouts of one backend and one number of ranks share a launch."""
    found: dict[tuple[bool, int], list[str]] = {}
    for name in names:
        ranks = parse_layout(name.removeprefix(MEGATRON)).ranks
        found.setdefault((name.startswith(MEGATRON), ranks), []).append(name)
    return [found[key] for key in sorted(found)]


def _launch(plan: Plan, truth: Path, names: Sequence[str]) -> Cells:
    """The cells of layouts of one size. A launch that breaks is repeated layout by layout."""
    started, ranks = time.perf_counter(), parse_layout(names[0].removeprefix(MEGATRON)).ranks
    try:
        told = launch(_in_rank, plan, truth, tuple(names), ranks=ranks, timeout_s=240, device="cpu")
    except (RankError, UserError) as error:
        if len(names) == 1:
            return {names[0]: {"error": brief(error)}}
        return {name: cell for one in names for name, cell in _launch(plan, truth, [one]).items()}
    seconds = round((time.perf_counter() - started) / len(names), 1)
    return {name: _cell(name, [rank[name] for rank in told]) | {"seconds": seconds} for name in names}


def _in_rank(plan: Plan, path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Body of one rank: (cells, digest) of every layout, or the refusal, which every rank raises alike."""
    compares = world().rank == 0
    truth = torch.load(path, weights_only=False) if compares else Truth.empty()
    found: dict[str, Any] = {}
    for name in names:
        backend = "megatron" if name.startswith(MEGATRON) else "fsdp"
        try:
            config = replace(plan.config, layout=parse_layout(name.removeprefix(MEGATRON)), backend=backend)
            own = replace(plan, config=config)
            if backend == "megatron":
                own = replace(own, cases=[case for case in plan.cases if not case.uses_teacher])
            findings = check_layout(name, own, truth, compares=compares)
        except UserError as error:
            found[name] = str(error)
        else:
            found[name] = (findings.cells, findings.digest.hexdigest())
    return found


def _cell(name: str, told: Sequence[Any]) -> dict[str, Any]:
    refusals = {message for message in told if isinstance(message, str)}
    if refusals:
        if len(refusals) == 1 and all(isinstance(message, str) for message in told):
            return {"refused": refusals.pop()}
        return {"error": f"the ranks do not agree on a refusal: {sorted(refusals)}"}
    cells = [*told[0][0], rank_cell(name, [digest for _, digest in told])]
    figures: dict[str, Any] = {}
    for check in CHECKS:
        found = worst(cells, check)
        figures[check] = None if found is None else found.as_json()["figure"]
    missed = [cell for cell in cells if not cell.passed]
    figures["passed"] = not missed and None not in figures.values()
    if missed:
        figures["misses"] = [f"{c.check} [{c.case}] {c.figure:.3g} > {c.limit:.3g} {c.where}" for c in missed[:5]]
    return figures


def run_all(models: Sequence[str], only: Sequence[str], out: Path, jobs: int, budget_s: float, commit: str) -> None:
    """One process a family, `jobs` at once; what is not done after the budget stays missing."""
    parts, origin = out.with_suffix(".parts"), provenance(ROOT)
    commit = commit or str(origin["commit"])
    deadline = time.monotonic() + budget_s

    def one(model: str) -> None:
        left = deadline - time.monotonic()
        names = [name for name in columns(model) if not only or name in only]
        if left < 10 or not names:
            return
        path = parts / f"{model}.json"
        command = [sys.executable, __file__, "--family", model, "--layouts", ",".join(names), "--out", str(path)]
        command += ["--commit", commit]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.terminate()  # its ranks end with it: their pipes break
            print(f"{model}: stopped at the budget", flush=True)
            return
        last = "done" if process.returncode == 0 else said.strip().splitlines()[-1:]
        print(f"{model}: {last} {time.monotonic() - deadline + budget_s:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, models))
    families = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(parts.glob("*.json"))}
    record = {"what": "longspan parity in fp64, CPU over gloo", **origin, "commit": commit, "families": families}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def unfold(out: Path, parts: Path, forgotten: Sequence[str]) -> None:
    """A file a family of what `out` holds, for its process to go on with."""
    parts.mkdir(parents=True, exist_ok=True)
    known = json.loads(out.read_text(encoding="utf-8"))["families"] if out.exists() else {}
    for model, cells in known.items():
        if not (parts / f"{model}.json").exists():
            (parts / f"{model}.json").write_text(json.dumps(cells), encoding="utf-8")
    for model in forgotten:
        (parts / f"{model}.json").unlink(missing_ok=True)


def render(families: Mapping[str, Cells]) -> str:
    """Markdown: layouts of every family, then those of some families and the other backend, then what was refused."""
    notes: dict[str, int] = {}
    rows = [name for name in ROWS if name in families]
    lines = [CAPTION, "", *_table(families, rows, ALL, notes), ""]
    lines += [*_table(families, rows, (*RECURRENT, *EXPERTS, *OTHER_BACKEND), notes), ""]
    lines += [f"{number}. {message}" for message, number in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


def _table(
    families: Mapping[str, Cells], rows: Sequence[str], names: Sequence[str], notes: dict[str, int]
) -> list[str]:
    head = ["| `tiny:` | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return head + [
        f"| `{row}` | "
        + " | ".join(_shown(families[row].get(name), name in columns(row), notes) for name in names)
        + " |"
        for row in rows
    ]


def _shown(cell: Mapping[str, Any] | None, asked: bool, notes: dict[str, int]) -> str:
    """The worst figure; where it is not held, bold; where refused, the number of the note; "-" where nothing is asked."""
    if cell is None:
        return "" if asked else "-"
    if "refused" in cell:
        number = notes.setdefault(_general(cell["refused"]), len(notes) + 1)
        return f"refused ({number})"
    if "error" in cell:
        return "**error**"
    figure = max(float(cell[check]) for check in SHOWN)
    return f"{figure:.0e}" if cell["passed"] else f"**{figure:.0e}**"


def _general(message: str) -> str:
    """One note for all families that are refused for the same reason."""
    first = ARCHITECTURE.sub("for this architecture.", message.splitlines()[0])
    for name in sorted(TINY, key=len, reverse=True):
        first = first.replace(f"tiny:{name}", "tiny:...")
    return first


def put(readme: Path, table: str) -> None:
    """Replace what stands between the two markers."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{readme} lacks {BEGIN!r} or {END!r}. Put both where the table belongs.")
    readme.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ORDER), help="families, comma-separated")
    parser.add_argument("--layouts", default="", help="only these columns, comma-separated")
    parser.add_argument("--jobs", type=int, default=5, help="families at once")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of wall time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "support.json")
    parser.add_argument("--commit", default="", help="commit of this tree where it is no git checkout")
    parser.add_argument("--fresh", action="store_true", help="forget the finished cells of the named families")
    parser.add_argument("--table", type=Path, help="render this file")
    parser.add_argument("--readme", type=Path, help="with --table: put it between the markers of this file")
    parser.add_argument("--family", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    only = [name for name in asked.layouts.split(",") if name]
    if asked.table is not None:
        table = render(json.loads(asked.table.read_text(encoding="utf-8"))["families"])
        if asked.readme is None:
            print(table, end="")
        else:
            put(asked.readme, table)
        return 0
    if asked.family is not None:
        run_family(asked.family, only, asked.out, asked.commit)
        return 0
    models = asked.models.split(",")
    if unknown := sorted(set(models) - set(TINY)):
        raise UserError(f"--models {unknown} are no tiny families. Use some of {', '.join(TINY)}.")
    unfold(asked.out, asked.out.with_suffix(".parts"), models if asked.fresh else ())
    run_all(models, only, asked.out, asked.jobs, asked.budget, asked.commit)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LongspanError as error:
        print(f"support: {error}", file=sys.stderr)
        sys.exit(2)
