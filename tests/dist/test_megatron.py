"""The megatron backend against the oracle (plain Hugging Face, one unpacked sample at a time, fp64): log-probs, gradients of
every parameter in one call and in two, weights after two steps.

Dense, expert, hybrid (Gated DeltaNet) and vision-language families under cp, tp, sp, pp, vpp, ep and etp, on 2, 3 and 4 ranks
in one launch each. 4 layers: pp2-vpp2 has one layer a chunk. Six heads, three of keys, or six experts: what 3 ranks can share.
"""

import pytest
from megatron_cases import Job, hold, installed, once, run

from longspan.parity.checks import ALL_CHECKS

NO_STEPS, GRADIENT = ("start", "logprob", "gradient"), ("start", "gradient")
HEADS, EXPERTS = {"num_attention_heads": 6}, {"num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 6}
MOE = ("ppo", "moe_aux", "moe_z")
DENSE = ("cp2-ring", "cp2-ulysses", "pp2", "ep2", "tp2-sp", "tp2")
SPREAD = ("ep2", "cp2-ring-ep2", "tp2-sp", "dp2", "tp2-etp2", "tp2-sp-etp2")
HYBRID = ("cp2-ring", "cp2-ulysses-heads", "tp2-sp", "tp2")
JOBS = {
    2: (
        Job("qwen3", DENSE, ("ppo", "together"), {"tp2": "tp"}, ALL_CHECKS),
        Job("qwen3", ("pp2-vpp2",), ("together",), over={"num_hidden_layers": 4}),
        Job("qwen2", ("tp2-sp", "pp2"), ("ppo",)),
        Job("llama", ("tp2", "pp2"), ("ppo",)),
        Job("mistral", ("tp2-sp", "cp2-gather"), ("ppo",)),
        Job("qwen3_moe", SPREAD, MOE, {"dp2": "data", "tp2-sp-etp2": "columns"}),
        Job("qwen3_moe", ("pp2", "pp2-vpp2"), MOE, {"pp2-vpp2": "routers"}, over={"num_hidden_layers": 4}),
        Job("qwen3_vl", ("cp2-ring", "tp2-sp", "tp2"), ("together",)),
        Job("qwen3_vl_moe", ("cp2-ring-ep2", "tp2-sp"), ("together", "moe_aux"), checks=NO_STEPS),
        Job("qwen3_5", HYBRID, ("together",), {"tp2": "tp"}),
        Job("qwen3_5_mtp", ("cp2-ring", "dp2", "tp2-sp"), ("mtp",), checks=GRADIENT),
        Job("qwen3_5_vl", ("cp2-ring", "tp2-sp"), ("together",), checks=NO_STEPS),
        Job("qwen3_5_moe", ("cp2-ring-ep2", "tp2-sp"), ("ppo", "moe_aux"), checks=NO_STEPS),
        Job("qwen3_5_moe_mtp", ("tp2-sp-etp2",), ("together", "mtp"), checks=GRADIENT),
        Job("qwen3_next", ("tp2-sp",), ("ppo", "moe_z"), checks=NO_STEPS),
    ),
    3: (
        Job("qwen3", ("cp3-ring", "dp3", "cp3-gather"), ("together",), {"cp3-gather": "data"}),
        Job("qwen3", ("cp3-ulysses",), ("ppo",), over=HEADS),
        Job("mistral", ("cp3-ring",), ("ppo",), checks=NO_STEPS),
        Job("qwen3_moe", ("cp3-ring-ep3", "tp3-sp-etp3"), MOE, {"tp3-sp-etp3": "columns"}, over=EXPERTS),
        Job("qwen3_vl", ("cp3-ring",), ("together",), checks=NO_STEPS),
        Job("qwen3_5", ("cp3-ring", "pp3"), ("together",), checks=NO_STEPS),
        Job("qwen3_5_moe_mtp", ("cp3-gather",), ("moe_aux", "mtp"), checks=GRADIENT),
    ),
    4: (
        Job("qwen3", ("tp2-cp2-gather", "pp2-cp2", "pp2-tp2-sp", "tp2-cp2-ring"), ("together",), {"tp2-cp2-ring": "data"}),
        Job(
            "qwen3",
            ("pp2-vpp2-tp2-sp", "pp2-vpp2-cp2-ring", "pp4-vpp2"),
            ("together",),
            checks=("logprob", "gradient"),
            over={"num_hidden_layers": 8},
        ),
        Job(
            "qwen3_moe",
            ("tp2-pp2-etp2", "cp2-ring-tp2-sp-ep2-etp2", "dp2-tp2-ep2-etp2"),
            ("together",),
            {"dp2-tp2-ep2-etp2": "columns"},
        ),
        Job("qwen3_5", ("tp2-cp2-ring", "tp2-cp2-gather-heads"), ("together",), checks=NO_STEPS),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Number of ranks -> what its jobs found."""
    return once(lambda ranks: run(JOBS[ranks], tmp_path_factory.mktemp(f"ranks{ranks}")))


@installed
@pytest.mark.parametrize(
    ("ranks", "job", "layout"),
    [(ranks, job.name, layout) for ranks, jobs in JOBS.items() for job in jobs for layout in job.layouts],
)
def test_every_layout_equals_the_oracle(table, ranks, job, layout):
    hold(table(ranks), job, layout)


@installed
@pytest.mark.parametrize(
    ("ranks", "job", "fault"),
    [(ranks, job.name, fault) for ranks, jobs in JOBS.items() for job in jobs for fault in job.faults.items()],
    ids=str,
)
def test_a_missing_sum_is_found(table, ranks, job, fault):
    assert any(not cell.passed for cell in table(ranks)[job, fault][0])
