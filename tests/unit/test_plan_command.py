"""`longspan plan`: numbers in its JSON, a picture, and errors that say the smallest change that would work."""

import json
import re
import time

import pytest

from longspan.cli import main
from longspan.data.cost import CostModel
from longspan.data.machine import SHIPPED
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


def test_the_cost_of_many_samples_is_computed_at_once(tmp_path, monkeypatch):
    """A cost model that is asked sample by sample made 100,000 samples take 42 s."""
    asked, parts, out = [], CostModel.parts, tmp_path / "plan.json"
    monkeypatch.setattr(
        CostModel, "parts", lambda self, lengths, size: asked.append(size) or parts(self, lengths, size)
    )
    lengths = ",".join(str(900 + number % 3000) for number in range(6000))
    command = ["plan", "--model", "tiny:qwen3", "--gpus", "4", "--lengths", lengths, "--json", str(out)]
    assert main(command) == 0 and 0 < len(asked) < 300
    report = json.loads(out.read_text())
    assert sum(len(row["samples"]) for rows in report["micro_steps"] for row in rows) == 6000


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
        (["--lengths", "\u00b2"], "'\u00b2' is not a positive number"),
        (["--lengths", "1x100000000000"], "100000000000 samples or more, above the 131072"),
        (["--lengths", "1x131072,1"], "131073 samples or more"),
        (["--lengths", "9" * 5000], "is not a positive number of at most 12 digits"),
        (["--lengths", "9", "--gpus", "65537"], "gpus=65537 is above 65536"),
        (["--lengths", "9", "--layouts", "cp1000000000000"], "cp=1000000000000 is above 1048576"),
        (["--lengths", "9", "--layouts", "tp2", "--backend", "fsdp"], "--layouts tp2 has tp or pp"),
        (["--lengths", "9", "--layouts", "dp2,pp2", "--backend", "fsdp"], "--layouts pp2 has tp or pp"),
        (["--lengths", "9", "--layouts", "ep2"], "spread experts, and the model has no experts"),
        (["--lengths", "9", "--visual-share", "0.5"], "visual_share=0.5 needs a vision tower, and tiny:qwen3 has none"),
        (["--lengths", "9", "--machine", "h9000"], "Shipped: ['h200']"),
        (["--lengths", "9", "--visual-share", "2"], "visual_share=2.0 is not in 0..1"),
        (["--lengths", "9", "--picture", "plan.gif"], "must end in .png or .html"),
        (["--histogram", "/nowhere.json"], "--histogram /nowhere.json cannot be read"),
        (["--lengths", "9", "--layouts", "tp2,dp4"], "need 2, 4 ranks. Rank layouts of equally many"),
        (["--lengths", "9", "--layouts", "tp2,x2"], "unknown part 'x2'"),
        (["--lengths", "9", "--layouts", ","], "names no layout"),
        (
            ["--lengths", "9", "--layouts", "tp2", "--gpus", "4"],
            "needs dp * cp * tp * pp = 1 * 1 * 2 * 1 = 2 GPUs, and there are 4",
        ),
        (["--lengths", "9", "--layouts", "pp3"], "pp * vpp=3 must divide the model's 2 layers. Use pp * vpp in (1, 2)"),
        (["--lengths", "9", "--layouts", "tp4"], "tp=4 must divide the model's 2 KV heads. Use tp in (1, 2)"),
        (
            ["--lengths", "9", "--freeze", "head"],
            "freeze='head' names what this model has not: name some of embeddings, layers",
        ),
        (["--lengths", "9", "--freeze", "vision"], "freeze='vision' names what this model has not"),
        (["--lengths", "9", "--freeze", "layers,embeddings"], "freeze='layers,embeddings' leaves nothing to train"),
        (
            ["--model", "tiny:qwen3_vl", "--lengths", "9", "--freeze", "layers,embeddings,vision"],
            "leaves nothing to train",
        ),
        (["--lengths", "9", "--backend", "megatron", "--compile"], "compile=True is not built for backend='megatron'"),
        (["--lengths", "9", "--max-tokens-per-rank", "0"], "max_tokens_per_rank=0 must be a positive number"),
        (["--model", "tiny:gemma3", "--lengths", "9", "--layouts", "tp2"], "no weight table for Gemma3ForCausalLM"),
        (
            ["--lengths", "9", "--json", "/dev/null/x"],
            "--json: /dev/null/x cannot be written, because /dev/null is no folder",
        ),
        (["--lengths", "9", "--json", "/tmp"], "--json: /tmp cannot be written, because it is a folder"),
        (["--lengths", "9", "--picture", "/dev/null/x.png"], "--picture: /dev/null/x.png cannot be written"),
        (
            ["--lengths", "9", "--picture", "/nowhere/x.png"],
            "cannot be written, because there is no folder /nowhere. Make it",
        ),
        (["--lengths", "9", "--json", "x.html", "--picture", "./x.html"], "--json and --picture both name x.html"),
        (
            ["--lengths", "9x4097", "--picture", "x.png"],
            "draws at most 4096 samples on 1024 GPUs, and these are 4097 on 1",
        ),
        (["--lengths", "9", "--gpus", "1025", "--picture", "x.png"], "and these are 1 on 1025"),
        (["--lengths", "9", "--json", "/dev/full"], "/dev/full cannot be written: No space left on device"),
        (["--lengths", "9", "--json", "/proc/x.json"], "because /proc is no folder that this user may write to"),
    ],
)
def test_contradictory_settings_are_refused(capsys, arguments, words):
    assert main(["plan", "--model", "tiny:qwen3", "--gpu-memory-gib", "10", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_histograms(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text('{"2000": 3, "70": 1}')
    assert read_histogram(path) == (2000, 2000, 2000, 70)
    for text, words in (
        ("[]", "JSON object"),
        ("{}", "JSON object"),
        ("{", "cannot be read"),
        ('{"a": 1}', "'a'"),
        ("[" * 100000, "cannot be read"),
        ('{"1": 1000000000000000000}', "not a positive number of at most"),
        ('{"1": 131072, "2": 1}', "131073 samples or more"),
        ('{"5": 1, "5": 2}', "stands in it twice"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            read_histogram(path)


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--model", "tiny:qwen3", "--lengths", "9"],
        ["bench"],
        ["bench", "--calibrate", "mine.json"],
        ["parity"],
        ["export", "run", "out"],
    ],
    ids=" ".join,
)
def test_a_report_that_cannot_be_written_is_refused_before_any_work(command, capsys):
    started = time.perf_counter()
    for path, why in (
        ("/dev/null/x", "/dev/null is no folder that this user may write to"),
        ("/nowhere/at/all/x", "there is no folder /nowhere/at/all. Make it first, or name another"),
    ):
        assert main([*command, "--json", path]) == 2
        said = capsys.readouterr().err.strip()
        assert said.endswith(f"--json: {path} cannot be written, because {why}")
        assert len(said.splitlines()) == 1
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0, which must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers"),
        ({"hidden_size": -8}, "hidden_size=-8"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": "wide"}, "no readable config (Validation error for field 'hidden_size'"),
        ({"model_type": "no_such"}, "no readable config"),
        (None, "no readable config"),
    ],
    ids=str,
)
def test_a_config_that_no_model_has_is_one_line_and_status_2(tmp_path, capsys, changes, words):
    config = [] if changes is None else tiny("qwen3").to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path), "--lengths", "9"]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and words in said, said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"matmul_flops": 0}, "matmul_flops is 0; it is a number from 1e-15 to 1e+30"),
        ({"matmul_flops": 10**400}, "matmul_flops is 1000"),
        ({"node_ranks": True}, "node_ranks is True"),
        ({"node_ranks": 0.5}, "node_ranks is 0.5"),
        ({"gather_overlap": 1.5}, "gather_overlap is 1.5; it is a number from 0 to 1"),
        (None, "is not JSON"),
    ],
    ids=["zero", "beyond a float", "a bool", "half a rank", "more than all", "too deep"],
)
def test_constants_of_no_machine_are_refused(tmp_path, capsys, changes, words):
    path, known = tmp_path / "m.json", json.loads((SHIPPED / "h200.json").read_text())
    path.write_text("[" * 100_000 if changes is None else json.dumps(known | changes))
    assert main(["plan", "--model", "tiny:qwen3", "--lengths", "9", "--machine", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and words in said, said


def test_an_export_to_no_folder_is_refused_before_any_work(capsys):
    assert main(["export", "run", "/dev/null/x"]) == 2
    assert "OUT: /dev/null/x cannot be written, because /dev/null is no folder" in capsys.readouterr().err


def test_a_file_that_is_not_utf8_is_one_line_and_status_2(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"input_ids": [1], "target_ids": [2], "mask": [1]}\n{"group": "\xff"}\n')
    assert main(["plan", "--model", "tiny:qwen3", "--samples", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and "line 2" in said and "UTF-8" in said
    path.write_bytes(b'{"2000": 3, "\xff": 1}')
    assert main(["plan", "--model", "tiny:qwen3", "--histogram", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def planned(tmp_path, *flags):
    out = tmp_path / "plan.json"
    command = ["plan", "--model", model_folder(tmp_path), "--lengths", "2000x63,16384", "--json", str(out)]
    assert main([*command, *flags]) == 0
    return json.loads(out.read_text())


def test_layouts_of_both_backends_are_ranked_by_the_same_clock(tmp_path, capsys):
    names = ("dp4", "dp2-cp2", "dp2-tp2-sp", "dp2-tp2", "cp2-tp2-sp", "dp2-pp2", "tp4", "tp2-pp2")
    report = planned(tmp_path, "--layouts", ",".join(names), "--recompute", "full")
    ranked = [(report["makespan_s"], report["layout"]), *((c["makespan_s"], c["name"]) for c in report["alternatives"])]
    assert [seconds for seconds, _ in ranked[1:]] == sorted(seconds for seconds, _ in ranked[1:])
    place = {
        name: next(n for n, (_, found) in enumerate(ranked) if found.startswith(name + "-ulysses")) for name in names
    }
    assert place["dp4"] < place["dp2-tp2-sp"] < place["dp2-tp2"] < place["tp4"], (
        "what fits without tp is not faster with it"
    )
    said = capsys.readouterr().out
    assert any("backend='megatron' runs eager" in sentence for sentence in report["why"])
    assert "memory of a rank:" in said and "tp2-pp2" in said.replace("\n", "")


def test_a_pipeline_says_what_each_stage_holds_and_waits(tmp_path):
    report = planned(tmp_path, "--layouts", "pp4")
    assert report["backend"] == "megatron" and len(report["stages"]) == 4
    assert 0 < report["bubble_share"] < report["idle_share"]
    busy = [stage["busy_share"] for stage in report["stages"]]
    assert busy[3] == max(busy) > 1.2 * busy[1] == pytest.approx(1.2 * busy[2]), "the head is on the last stage"
    held = [sum(stage["memory_gib"].values()) for stage in report["stages"]]
    assert report["peak_memory_gib"] == pytest.approx(max(held)) and held[1] > held[2], "more micro-steps in flight"


def test_a_search_of_megatrons_layouts(tmp_path):
    """One row of 98,304 tokens on 4 GPUs: the search finds what fits, and the layout it names is planned alike by itself."""
    out = tmp_path / "plan.json"
    command = ["plan", "--model", model_folder(tmp_path), "--lengths", "98304", "--gpus", "4", "--json", str(out)]
    assert main([*command, "--gpu-memory-gib", "40", "--backend", "megatron"]) == 0
    found = json.loads(out.read_text())
    assert found["peak_memory_gib"] <= 40 and found["backend"] == "megatron"
    name = found["layout"]
    assert main([*command, "--gpu-memory-gib", "40", "--backend", "megatron", "--layouts", name]) == 0
    again = json.loads(out.read_text())
    assert again["makespan_s"] == pytest.approx(found["makespan_s"]) and again["layout"] == name


def test_settings_of_a_run_are_planned_as_they_are(tmp_path):
    """A budget, a policy and frozen embeddings, as a recipe has them."""
    free = planned(tmp_path, "--layouts", "dp2-tp2-sp")
    held = planned(
        tmp_path,
        "--layouts",
        "dp2-tp2-sp",
        "--recompute",
        "full",
        "--max-tokens-per-rank",
        "16384",
        "--freeze",
        "embeddings",
    )
    assert held["recompute"] == "full" and held["max_tokens_per_rank"] == 16384 <= held["room_tokens_per_rank"]
    assert held["stages"][0]["memory_gib"]["gradients"] < free["stages"][0]["memory_gib"]["gradients"]


def test_any_backend_leaves_out_what_megatron_refuses(tmp_path, capsys):
    """A family without a weight table there, and compile=True; layouts that only megatron runs are refused outright."""
    out = tmp_path / "plan.json"
    command = ["plan", "--lengths", "900x8", "--gpus", "4", "--backend", "any", "--json", str(out)]
    for flags, why in (
        (["--model", "tiny:gpt_oss"], "backend='megatron' has no weight table for GptOssForCausalLM"),
        (["--model", "tiny:qwen3", "--compile"], "compile=True is not built for backend='megatron'"),
        (["--model", "tiny:qwen3"], None),
    ):
        assert main([*command, *flags]) == 0
        report = json.loads(out.read_text())
        ranked = [report["backend"], *(each["name"] for each in report["alternatives"])]
        assert any("megatron" in name for name in ranked) == (why is None)
        said = [sentence for sentence in report["why"] if "left out" in sentence]
        assert said == [] if why is None else said[0].startswith(f"megatron's layouts are left out: {why}")
    assert main([*command, "--model", "tiny:gpt_oss", "--layouts", "tp4"]) == 2
    assert "no weight table for GptOss" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--gpus", "4"], ["--layouts", "dp2-cp2"]], ids=["search", "named"])
def test_a_small_budget_is_refused_as_such_and_the_named_one_works(capsys, flags):
    command = ["plan", "--model", "tiny:qwen3", "--lengths", "90000,700", *flags, "--max-tokens-per-rank"]
    assert main([*command, "100"]) == 2
    message = capsys.readouterr().err
    assert "max_tokens_per_rank=100 holds no row with the longest sample (90000 tokens)" in message
    assert "GiB" not in message
    least = int(message.split("from max_tokens_per_rank=")[1].split()[0])
    assert main([*command, str(least - 1)]) == 2 and main([*command, str(least)]) == 0


def test_each_refused_layout_has_one_line(capsys):
    command = ["plan", "--model", "tiny:qwen3", "--lengths", "900"]
    assert main([*command, "--layouts", "dp2-etp2,dp2-ep2"]) == 2
    message = capsys.readouterr().err
    assert "dp2-etp2: ep=1, etp=2 spread experts, and the model has no experts" in message
    assert message.count("no experts") == 2 and message.count("dp2-etp2") == 1
    assert main([*command, "--layouts", "tp2-etp2"]) == 2
    assert "tp2-etp2: etp=2 cuts experts, and the model has no experts" in capsys.readouterr().err
    assert main(["plan", "--model", "tiny:qwen3_moe", "--lengths", "900", "--layouts", "dp3-ep3"]) == 2
    assert "dp3-ep3: ep=3 must divide the model's 4 experts" in capsys.readouterr().err
