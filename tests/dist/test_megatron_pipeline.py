"""The order of a pipeline's moves, and interleaved stages with routers under every number of micro-steps: odd and even, below
and above pp. Against the oracle: test_megatron.py.
"""

import itertools
from collections import Counter

import pytest
import torch
from megatron_cases import Job, engine_of, installed
from ragged import ragged

from longspan import Objective, launch
from longspan.data import Sample
from longspan.engine.megatron.schedule import receives_ahead, schedule

MODEL = Job("qwen3_moe", (), (), over={"num_hidden_layers": 4})
LENGTHS = (13, 1, 22, 7, 9)


def samples():
    return ragged(lengths=LENGTHS, tempered=False)


def any_number_of_micro_steps(model):
    """budget -> (micro-steps, gradients, routes) of pp2-vpp2, then with the routes replayed."""
    found = {}
    for budget in (23, 30, 60):
        engine = engine_of(model, "pp2-vpp2", dtype="float64", max_tokens_per_rank=budget)
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
    engine = engine_of(model, "dp1", "fsdp", dtype="float64", max_tokens_per_rank=60)
    routes = [out["routed_experts"] for out in engine.forward(samples(), outputs=("routed_experts",))]
    metrics = engine.forward_backward(samples(), Objective("reinforce", moe_aux=1.0, moe_z=0.1))
    found = metrics["loss/moe_aux"], engine.gradients(), routes
    engine.clear_gradients()
    engine.forward_backward(given, Objective("reinforce"))
    return *found, engine.gradients()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    model = MODEL.path(tmp_path_factory.mktemp("pipeline"))
    found = launch(any_number_of_micro_steps, model, ranks=2, timeout_s=120)[0]
    return found, unsharded(model, found[2])


def distance(got, want):
    return max(float((got[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in want.items())


@installed
def test_any_number_of_micro_steps_interleaves_and_routers_of_all_stages_count(two_ranks):
    (found, replayed, _), (aux, gradients, routes, want_replayed) = two_ranks
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
