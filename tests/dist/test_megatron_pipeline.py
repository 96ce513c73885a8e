"""Interleaved pipelines and routers on several pipeline stages, against the oracle.

4 layers: pp2-vpp2 has one layer a chunk. Micro-steps are cut so that their number is odd and even, below and above pp.
"""

import itertools
from collections import Counter

import pytest
import torch
from megatron_cases import Job, hold, installed, run

from longspan import Engine, EngineConfig, Objective
from longspan.data import Sample
from longspan.engine.megatron.schedule import receives_ahead, schedule
from longspan.layout import parse_layout

JOBS = (
    Job("qwen3", ("pp2-vpp2",), ("together",), num_layers=4),
    Job("qwen3_moe", ("pp2", "pp2-vpp2"), ("ppo", "moe_aux", "moe_z"), "routers", num_layers=4),
)
FOUR = (
    Job(
        "qwen3",
        ("pp2-vpp2-tp2-sp", "pp2-vpp2-cp2-ring", "pp4-vpp2"),
        ("together",),
        checks=("logprob", "gradient"),
        num_layers=8,
    ),
)


def samples():
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (13, 1, 22, 7, 9):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        made.append(
            Sample(ids[:-1], ids[1:], torch.ones(length), {"advantage": torch.randn(length, generator=generator)})
        )
    return made


def build(name, model, backend, budget=60):
    layout = parse_layout(name)
    return Engine.build(
        EngineConfig(model, layout=layout, backend=backend, dtype="float64", max_tokens_per_rank=budget)
    )


def any_number_of_micro_steps(model):
    """budget -> (micro-steps, gradients, routes) of pp2-vpp2, then with the routes replayed."""
    found = {}
    for budget in (23, 30, 60):
        engine = build("pp2-vpp2", model, "megatron", budget)
        routes = [out["routed_experts"] for out in engine.forward(samples(), outputs=("routed_experts",))]
        metrics = engine.forward_backward(samples(), Objective("reinforce", moe_aux=1.0, moe_z=0.1))
        found[budget] = (int(metrics["plan/micro_steps"]), metrics["loss/moe_aux"], engine.gradients(), routes)
    engine.clear_gradients()
    other = [torch.remainder(route + 1, 4) for route in routes]
    given = [
        Sample(s.input_ids, s.target_ids, s.mask, {**s.fields, "routed_experts": r})
        for s, r in zip(samples(), other, strict=True)
    ]
    engine.forward_backward(given, Objective("reinforce"))
    return found, engine.gradients(), given


def unsharded(model, given):
    """The same numbers by the fsdp backend on one rank."""
    engine = build("dp1", model, "fsdp")
    routes = [out["routed_experts"] for out in engine.forward(samples(), outputs=("routed_experts",))]
    metrics = engine.forward_backward(samples(), Objective("reinforce", moe_aux=1.0, moe_z=0.1))
    found = metrics["loss/moe_aux"], engine.gradients(), routes
    engine.clear_gradients()
    engine.forward_backward(given, Objective("reinforce"))
    return *found, engine.gradients()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    model = JOBS[1].path(folder := tmp_path_factory.mktemp("pipeline"))
    table, found = run(JOBS, folder, lambda _: any_number_of_micro_steps(model))
    return table, found, unsharded(model, found[2])


@installed
@pytest.mark.parametrize(("job", "layout"), [(job.name, layout) for job in JOBS for layout in job.layouts])
def test_interleaved_stages_equal_the_oracle(two_ranks, job, layout):
    hold(two_ranks[0], job, layout)


@installed
def test_interleaved_stages_on_four_ranks_equal_the_oracle(tmp_path):
    table, _ = run(FOUR, tmp_path)
    for layout in FOUR[0].layouts:
        hold(table, FOUR[0].name, layout)


@installed
def test_router_losses_of_one_stage_only_are_found(two_ranks):
    assert any(not cell.passed for cell in two_ranks[0]["qwen3_moe-4", "fault"][0])


def distance(got, want):
    return max(float((got[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in want.items())


@installed
def test_any_number_of_micro_steps_interleaves_and_routers_of_all_stages_count(two_ranks):
    _, (found, replayed, _), (aux, gradients, routes, want_replayed) = two_ranks
    counts = [count for count, *_ in found.values()]
    assert sorted(counts) == [1, 2, 3], counts
    for _, own_aux, own, own_routes in found.values():
        assert abs(own_aux - aux) <= 1e-12 * abs(aux)
        assert distance(own, gradients) <= 1e-11
        assert all(torch.equal(a, b) for a, b in zip(own_routes, routes, strict=True))
    assert distance(replayed, want_replayed) <= 1e-11
    assert distance(replayed, gradients) > 1e-3, "other routes give other gradients"


def play(pp, vpp, count, *, trains=True, plan=schedule):
    """Run every rank's moves with receives that wait; returns the most micro-steps held at once by each rank."""
    queues = [list(plan(range(count), rank=rank, pp=pp, vpp=vpp, trains=trains)) for rank in range(pp)]
    sizes = [len(queue) for queue in queues]
    done, held, most = set(), [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                move = queue[0]
                stage, forward = move.chunk * pp + rank, move.step is not None
                needs = (stage - 1 if forward else stage + 1, move.number, forward)
                if 0 <= needs[0] < pp * vpp and needs not in done:
                    break
                if not forward:
                    assert (stage, move.number, True) in done, "a backward before its forward"
                done.add((stage, move.number, forward))
                held[rank] += 1 if forward else -1
                most[rank] = max(most[rank], held[rank])
                queue.pop(0)
                moved = True
    assert not any(queues), f"pp={pp} vpp={vpp} micro-steps={count}: ranks wait for each other"
    assert sizes == [count * vpp * (2 if trains else 1)] * pp
    return most


def test_no_schedule_makes_ranks_wait_for_each_other():
    for pp, vpp, count in itertools.product(range(1, 7), range(1, 5), range(1, 16)):
        if vpp == 1 or pp > 1:
            most = play(pp, vpp, count)
            play(pp, vpp, count, trains=False)
            bounds = [pp - r if vpp == 1 else 2 * (pp - 1 - r) + (vpp - 1) * pp + 1 for r in range(pp)]
            assert all(m <= bound for m, bound in zip(most, bounds, strict=True)), (pp, vpp, count, most)


def test_the_player_finds_a_schedule_that_waits():
    def too_late(steps, *, rank, pp, vpp, trains):
        """The last rank wants all forwards before its first backward, the others do not send them."""
        moves = list(schedule(steps, rank=rank, pp=pp, vpp=vpp, trains=trains))
        return sorted(moves, key=lambda move: move.step is None) if rank == pp - 1 else moves

    with pytest.raises(AssertionError, match="wait for each other"):
        play(2, 1, 4, plan=too_late)


def meets(pp, vpp, count, ahead, *, trains=True):
    """Whether all moves run when each waits for its whole device: for its input, and for a posted receive of all that its rank
    sent before. CUDA does that at a kernel's first run and when memory is given back."""

    def link(stage, forward):
        """Between this virtual stage and the next: a communicator of its own from the last rank to the first."""
        return (stage % pp, (stage + 1) % pp, forward)

    queues = [list(schedule(range(count), rank=rank, pp=pp, vpp=vpp, trains=trains)) for rank in range(pp)]
    at, next_post = [0] * pp, [0] * pp
    sent, posted = Counter(), Counter()
    inputs, unread = {}, [[] for _ in range(pp)]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                while next_post[rank] <= min(at[rank] + ahead, len(queue) - 1):
                    move = queue[next_post[rank]]
                    stage, forward = move.chunk * pp + rank, move.step is not None
                    if 0 <= (before := stage - 1 if forward else stage + 1) < pp * vpp:
                        own = link(before if forward else stage, forward)
                        posted[own] += 1
                        inputs[rank, next_post[rank]] = own, posted[own]
                    next_post[rank] += 1
                own, number = inputs.get((rank, at[rank]), (None, 0))
                unread[rank] = [(other, n) for other, n in unread[rank] if posted[other] < n]
                if unread[rank] or (own is not None and sent[own] < number):
                    break
                move = queue[at[rank]]
                stage, forward = move.chunk * pp + rank, move.step is not None
                if stage < pp * vpp - 1 if forward else stage > 0:
                    own = link(stage if forward else stage - 1, forward)
                    sent[own] += 1
                    unread[rank].append((own, sent[own]))
                at[rank] += 1
                moved = True
    return all(at[rank] == len(queue) for rank, queue in enumerate(queues))


def test_no_schedule_stops_when_every_move_waits_for_its_device():
    for pp, vpp, count in itertools.product(range(2, 7), range(1, 5), (1, 2, 4, 5, 7, 12, 15)):
        assert meets(pp, vpp, count, receives_ahead(vpp)), (pp, vpp, count)
        assert meets(pp, vpp, count, receives_ahead(vpp), trains=False), (pp, vpp, count)
    assert not meets(2, 2, 4, 0), "receives posted in their own turn stop here"
