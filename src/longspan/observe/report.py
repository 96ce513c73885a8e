"""report.html of a run: what ran, the curves, the evaluations and a few rollouts with their pictures.

Made from the run folder alone (config.json, versions.json, metrics.jsonl, rollouts.jsonl, certificate.json), so it
can be made again at any time, also of a run that was stopped. One file, pictures inline, no script, no request to
anywhere.

A row of rollouts.jsonl: {"stage", "step", "prompt": id, "text", "images": [data URIs], "answer", "responses":
[{"text", "reward", "logprob"}]}.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.observe.metrics import read_jsonl
from longspan.observe.plots import curves, data_uri

__all__ = ["write_report"]

STYLE = """body{font:14px/1.5 sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0}td,th{border:1px solid #ccc;padding:2px 8px;text-align:left}
pre{background:#f6f6f6;padding:8px;overflow:auto}
img.picture{width:48px;height:48px;image-rendering:pixelated;margin:2px;border:1px solid #999}
.rollout{border:1px solid #ddd;margin:.7em 0;padding:.5em 1em}.good{color:#070}.bad{color:#a00}"""

# panel title -> the metrics drawn in it, in this order; a panel without data is left out
PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "evaluation pass@1": ("eval/pass@1", "eval/greedy"),
    "loss": ("loss/total", "loss/cross_entropy", "loss/importance_sampling", "loss/ppo"),
    "entropy": ("entropy/mean",),
    "log-prob gap, sampler against trainer": ("gap/mean", "gap/p99", "gap/max"),
    "gradient norm": ("grad/norm",),
    "learning rate": ("lr",),
    "groups with a signal": ("reward/mixed_groups",),
    "seconds a step": ("time/sample_s", "time/update_s", "time/step_s"),
    "tokens/s": ("tok/per_s",),
}


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` and return its path."""
    metrics = read_jsonl(folder / "metrics.jsonl")
    parts = [f"<h1>{html.escape(folder.name)}</h1>", _provenance(folder)]
    for stage in dict.fromkeys(row["stage"] for row in metrics):
        rows = [row for row in metrics if row["stage"] == stage]
        parts += [f"<h2>{html.escape(stage)}: {rows[-1]['step']} steps</h2>", _last_numbers(rows)]
        panels = _panels(rows)
        if panels:
            parts.append(f'<img src="{data_uri(curves(panels))}" alt="curves of {html.escape(stage)}">')
    parts += _rollouts(read_jsonl(folder / "rollouts.jsonl"))
    if (folder / "certificate.json").exists():
        parts += ["<h2>Certificate</h2>", _pre((folder / "certificate.json").read_text(encoding="utf-8"))]
    if (folder / "config.json").exists():
        parts += ["<h2>Config</h2>", _pre((folder / "config.json").read_text(encoding="utf-8"))]
    head = f'<meta charset="utf-8"><title>{html.escape(folder.name)}</title><style>{STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    path, temporary = folder / "report.html", folder / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _provenance(folder: Path) -> str:
    if not (folder / "versions.json").exists():
        return ""
    known = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {number}" for name, number in known["versions"].items())
    dirty = " with local changes" if known["dirty"] else ""
    source = f"commit {known['commit']}{dirty}; Python {known['python']}; {versions}; {known['platform']}"
    return f"<p>{html.escape(source)}</p>"


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    panels = {}
    for title, names in PANELS.items():
        lines = {name: _points(rows, name) for name in names}
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            panels[title] = lines
    return panels


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _last_numbers(rows: Sequence[Mapping[str, Any]]) -> str:
    """First and last value of each metric of the stage."""
    names = [name for names in PANELS.values() for name in names]
    cells = []
    for name in names:
        points = _points(rows, name)
        if points:
            cells.append(
                f"<tr><td>{html.escape(name)}</td><td>{points[0][1]:.4g}</td><td>{points[-1][1]:.4g}</td></tr>"
            )
    return f"<table><tr><th>metric</th><th>first</th><th>last</th></tr>{''.join(cells)}</table>"


def _rollouts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = ["<h2>Rollouts</h2>"] if rows else []
    for row in rows:
        images = "".join(f'<img class="picture" src="{html.escape(uri)}" alt="">' for uri in row["images"])
        answers = "".join(
            f'<li class="{"good" if answer["reward"] > 0 else "bad"}">{html.escape(answer["text"])} '
            f"(reward {answer['reward']:g}, log-prob {answer['logprob']:.3f})</li>"
            for answer in row["responses"]
        )
        head = f"{row['stage']} step {row['step']}, {row['prompt']}: {row['text']} right: {row['answer']}"
        parts.append(f'<div class="rollout"><div>{html.escape(head)}</div>{images}<ul>{answers}</ul></div>')
    return parts


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
