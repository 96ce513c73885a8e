"""`longspan plan`: numbers in its JSON, a picture, and errors that say the smallest change that would work."""

import json
import re

import pytest

from longspan.cli import main
from longspan.engine.plan_command import parse_lengths, read_histogram
from longspan.errors import UserError
from longspan.models.tiny import tiny


def test_lengths_are_read():
    assert parse_lengths("2000x3,65536") == (2000, 2000, 2000, 65536)
    drawn = parse_lengths("4000/64000")
    assert max(drawn) == 64000 and 2000 < sum(drawn) / len(drawn) < 6000
    for text in ("", "12,", "0", "-3", "3x0", "9/4"):
        with pytest.raises(UserError, match="lengths"):
            parse_lengths(text)


def test_plan_reports_a_schedule_and_its_bound(tmp_path):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.html"
    command = ["plan", "--model", "tiny:qwen3", "--gpus", "4", "--gpu-memory-gib", "139", "--lengths", "2000x63,65536"]
    assert main([*command, "--json", str(out), "--picture", str(picture)]) == 0
    report = json.loads(out.read_text())
    assert 0 < report["lower_bound_s"] <= report["makespan_s"]
    assert 0 < report["peak_memory_gib"] <= 139
    placed = sorted(sample for rows in report["micro_steps"] for row in rows for sample in row["samples"])
    assert placed == list(range(64))
    for rows in report["micro_steps"]:
        assert sum(row["size"] for row in rows) == 4
    others = [each["makespan_s"] for each in report["alternatives"] if each["makespan_s"] is not None]
    assert min(others) >= report["makespan_s"] / 1.005
    assert picture.read_text().startswith("<h1>")


def test_it_explains_itself(tmp_path, capsys):
    out = tmp_path / "plan.json"
    command = ["plan", "--model", model_folder(tmp_path), "--gpus", "4", "--lengths", "2000x63,65536"]
    assert main([*command, "--json", str(out)]) == 0
    why = json.loads(out.read_text())["why"]
    said = capsys.readouterr().out.replace("\n", " ")
    assert all(sentence.split(":")[0] in said for sentence in why)
    sizes, mixer, dynamic, recompute = why
    assert "65,536 tokens: needs cp=2, cp=2 1.00, cp=4 1.0" in sizes and "2,000 tokens: cp=1 1.00, cp=2 1.1" in sizes
    assert mixer.startswith("mixer ulysses: the cheapest at cp=4") and "ring 1." in mixer and "gather 1." in mixer
    assert "another choice of dynamic CP" in dynamic and "1.06 times" in dynamic
    assert "another choice of recomputation" in recompute


def test_the_issues_case_gives_each_row_what_it_needs(tmp_path):
    """63 short rows stay on one rank each; the long one, which fits no rank, takes several."""
    out = tmp_path / "plan.json"
    command = ["plan", "--model", model_folder(tmp_path), "--gpus", "4", "--lengths", "2000x63,65536"]
    assert main([*command, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["dynamic_cp"] and report["cp_sizes"] == {"1": 63, "4": 1}
    assert report["makespan_s"] <= 1.06 * report["lower_bound_s"]


def test_rows_that_gain_nothing_from_cp_get_none(tmp_path):
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", "tiny:qwen3", "--gpus", "4", "--lengths", "60,90,720", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["cp_sizes"] == {"1": 3} and not report["dynamic_cp"]


def model_folder(tmp_path, **changes):
    """Qwen3-1.7B's config."""
    config = tiny("qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                  num_attention_heads=16, num_key_value_heads=8, head_dim=128, **changes)  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("gpus", "memory", "lengths"),
    [("2", "20", "900000"), ("1", "3", "2000"), ("4", "8", "2000x8,300000")],
    ids=["a row that fits nowhere", "no memory and no ranks for the model", "both"],
)
def test_what_fits_nowhere_names_the_smallest_change_and_it_works(tmp_path, capsys, gpus, memory, lengths):
    model = model_folder(tmp_path)

    def plan(gpus: str, memory: str) -> int:
        return main(["plan", "--model", model, "--gpus", gpus, "--gpu-memory-gib", memory, "--lengths", lengths])

    assert plan(gpus, memory) == 2
    message = capsys.readouterr().err
    found = re.search(r"smallest change that would: (\d+) GiB a GPU(?: or (\d+) GPUs)?", message)
    assert found is not None, message
    assert plan(gpus, found[1]) == 0
    assert plan(gpus, str(int(found[1]) - 1)) == 2, "a smaller one would do"
    assert found[2] is None or plan(found[2], memory) == 0


def test_offload_is_planned_where_nothing_else_fits(tmp_path):
    """16 GiB hold neither 1.7B fp32 masters nor their moments."""
    out = tmp_path / "plan.json"
    command = ["plan", "--model", model_folder(tmp_path), "--gpus", "1", "--lengths", "2000", "--json", str(out)]
    assert main([*command, "--gpu-memory-gib", "16"]) == 0
    assert json.loads(out.read_text())["offload"] == ["checkpoints", "parameters"]
    assert main([*command, "--gpu-memory-gib", "60"]) == 0
    assert json.loads(out.read_text())["offload"] == []


def test_no_layout_helps_where_one_layer_does_not_fit(tmp_path, capsys):
    assert (
        main(["plan", "--model", model_folder(tmp_path), "--gpus", "2048", "--gpu-memory-gib", "2", "--lengths", "99"])
        == 2
    )
    assert re.search(r"smallest change that would: \d+ GiB a GPU\. The closest", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "exactly one of"),
        (
            ["--lengths", "9", "--samples", "x.jsonl"],
            "exactly one of --lengths, --samples, --histogram; got ['lengths'",
        ),
        (["--lengths", "9", "--gpus", "0"], "gpus=0"),
        (["--lengths", "9", "--gpu-memory-gib", "-1"], "gpu_memory_gib=-1"),
        (["--lengths", "9x"], "is not a positive number"),
        (["--lengths", "9", "--machine", "h9000"], "Shipped: ['h200']"),
        (["--lengths", "9", "--visual-share", "2"], "visual_share=2.0 is not in 0..1"),
        (["--lengths", "9", "--picture", "plan.gif"], "must end in .png or .html"),
        (["--histogram", "/nowhere.json"], "--histogram /nowhere.json cannot be read"),
    ],
)
def test_contradictory_settings_are_refused(capsys, arguments, words):
    assert main(["plan", "--model", "tiny:qwen3", "--gpu-memory-gib", "10", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_histograms(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text('{"2000": 3, "70": 1}')
    assert read_histogram(path) == (2000, 2000, 2000, 70)
    for text, words in (("[]", "JSON object"), ("{}", "JSON object"), ("{", "cannot be read"), ('{"a": 1}', "'a'")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            read_histogram(path)
