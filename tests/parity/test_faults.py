"""Every planted fault is caught, one at a time; without one the same checks pass. `make mutants` shows all."""

import pytest

from longspan.parity.faults import FAULTS, planted, resolve
from longspan.parity.mutants import run

GROUPS = sorted({(fault.model, fault.layout) for fault in FAULTS.values() if not fault.hangs})


def test_the_list_is_long_and_each_target_exists() -> None:
    assert len(FAULTS) >= 25
    for fault in FAULTS.values():
        for target, _ in fault.changes:
            owner, attribute = resolve(target)
            assert attribute in vars(owner)


@pytest.mark.parametrize(("model", "layout"), GROUPS)
def test_every_fault_is_caught(model: str, layout: str) -> None:
    names = [
        fault.name for fault in FAULTS.values() if (fault.model, fault.layout, fault.hangs) == (model, layout, False)
    ]
    verdicts = {verdict.fault: verdict.caught_by for verdict in run(names, quick=True)}
    assert verdicts.pop("none") == [], "a miss without a fault"
    missed = [name for name in names if not verdicts[name]]
    stopped = [name for name in names if verdicts[name] == ["run"]]
    assert not missed, f"not caught: {missed}"
    assert not stopped, f"caught only by stopping the ranks: {stopped}"


def test_a_skipped_micro_step_does_not_pass() -> None:
    """C1, O5: ranks that wait for each other are stopped by the launch's time limit and count as a miss."""
    verdicts = {verdict.fault: verdict.caught_by for verdict in run(["inert-skipped"], quick=True, hang_s=20.0)}
    assert verdicts["none"] == [] and verdicts["inert-skipped"]


def test_a_fault_ends_with_its_block() -> None:
    target = FAULTS["lost-call"].changes[0][0]
    owner, attribute = resolve(target)
    before = vars(owner)[attribute]
    with planted("lost-call"):
        assert vars(owner)[attribute] is not before
    assert vars(owner)[attribute] is before
