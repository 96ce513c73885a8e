"""Observed against predicted: a call that parts from its plan by more than 20 % gets one sentence with the likeliest
reason."""

from dataclasses import replace

import pytest

from longspan.engine.watch import AGAIN, Call, Signals, Watch

QUIET = Signals(0, 0)
PARTS = {"dense": 3.0, "attention": 7.0}


def call(
    measured: float, *, modelled: float = 1.0, layer_s: float = 0.1, traffic_s: float = 0.0, after: Signals = QUIET
) -> Call:
    return Call(modelled, measured, PARTS, layer_s, traffic_s, before=QUIET, after=after)


def settled(factor: float = 1.0) -> Watch:
    watch = Watch("mine", "cuda")
    for measured in (factor, 1.01 * factor, 0.99 * factor, factor, 1.1 * factor):
        watch.see(call(measured))
    return watch


def test_steady_calls_say_nothing():
    watch = Watch("mine", "cuda")
    assert [watch.see(call(seconds)) for seconds in (1.1, 0.9, 1.15, 1.0, 0.95, 1.1)] == [None] * 6


def test_a_planted_slow_call_is_told_from_its_neighbours():
    watch = settled()
    said = watch.see(call(3.0))
    assert said is not None and "3 s where the plan says 1 s" in said and "this call alone" in said
    assert watch.see(call(1.0)) is None, "one slow call must not move the prediction"
    assert watch.see(call(3.0)) is None, "said once"
    for _ in range(AGAIN):
        watch.see(call(1.0))
    assert watch.see(call(3.0)) is not None


@pytest.mark.parametrize(
    ("watch", "seen", "words"),
    [
        (Watch("mine", "cuda"), call(5.0), "the first call"),
        (settled(), call(5.0, after=Signals(0, 2)), "torch.compile made 2 graphs"),
        (settled(), call(5.0, after=Signals(3, 0)), "lower max_tokens_per_rank"),
    ],
)
def test_reasons(watch, seen, words):
    said = watch.see(seen)
    assert said is not None and words in said, said


def test_constants_that_are_off_are_named_and_then_replaced_by_the_runs_own_times():
    watch = Watch("mine", "cuda")
    watch.see(call(2.0))
    said = watch.see(call(2.0))
    assert said is not None and "constants of 'mine', first of all those of attention (70% of" in said
    watch.see(call(2.0))
    watch.see(call(2.0))
    assert watch.predicted_s(4.0) == pytest.approx(8.0)
    assert watch.see(call(8.0, modelled=4.0)) is None


def test_small_layers_are_the_hosts():
    watch = Watch("mine", "cuda")
    watch.see(call(1.0))
    said = watch.see(call(2.0, layer_s=0.0005))
    assert said is not None and "the host" in said and "0.5 ms" in said
    other = Watch("mine", "cpu")
    other.see(call(1.0))
    assert "constants" in (other.see(call(2.0, layer_s=0.0005)) or "")


def test_several_ranks_wait_for_each_other():
    watch = Watch("mine", "cuda")
    watch.see(call(1.0))
    said = watch.see(call(1.3, traffic_s=0.06))
    assert said is not None and "waiting for other ranks" in said and "at most 0.06 s" in said
    faster = Watch("mine", "cuda")
    faster.see(call(1.0))
    assert "constants" in (faster.see(call(0.5, traffic_s=0.06)) or ""), "nobody is fast by waiting"


def test_a_recompilation_does_not_move_the_prediction():
    watch = settled()
    for _ in range(6):
        watch.see(call(9.0, after=Signals(0, 1)))
    assert watch.predicted_s(1.0) == pytest.approx(1.0, rel=0.1)


def test_without_constants_nothing_is_said():
    watch = Watch(None, "cpu")
    assert watch.predicted_s(1000.0) == 0.0
    assert watch.see(call(1.0, modelled=1000.0)) is None
    assert watch.predicted_s(2000.0) == pytest.approx(2.0)
    assert watch.see(call(50.0, modelled=1000.0)) is None


def test_a_pipelines_bubble_is_named_as_such():
    watch = Watch("mine", "cuda", stage=0)
    watch.see(call(1.0))
    said = watch.see(replace(call(1.5), bubble_share=0.2))
    assert (
        said is not None and "20% of the call as the pipeline's bubble" in said and "lower max_tokens_per_rank" in said
    )
    full = Watch("mine", "cuda", stage=0)
    full.see(call(1.0))
    assert "constants" in (full.see(replace(call(1.5), bubble_share=0.02)) or ""), "a full pipeline is not what is slow"
    fast = Watch("mine", "cuda", stage=0)
    fast.see(call(1.0))
    assert "constants" in (fast.see(replace(call(0.5), bubble_share=0.2)) or ""), "nobody is fast by waiting"


def test_tensor_parallel_ranks_wait_for_each_other():
    watch = Watch("mine", "cuda")
    watch.see(call(1.0))
    said = watch.see(replace(call(1.5), parts=PARTS | {"tensor": 3.0}))
    assert said is not None and "tensor-parallel ranks" in said and "23%" in said


def test_full_memory_names_the_stage_and_both_peaks():
    watch = Watch("mine", "cuda", stage=2)
    watch.see(call(1.0))
    said = watch.see(replace(call(5.0, after=Signals(3, 0)), memory=(101.25, 130.0)))
    assert (
        said is not None
        and "memory of pipeline stage 2 is full (the memory model says 101.2 GiB, the peak is 130.0)" in said
    )
