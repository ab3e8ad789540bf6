"""What the audit calls equal, of weights that are written down here."""

import pytest

from cluster import audit


def test_a_small_gap_between_ranks():
    assert audit.differences({"w": 1.0}, {"w": 1.00001}) == ["w"]
    assert audit.differences({"w": 1.0}, {"w": 1.0000001}) == []


def steps(*weights):
    """{step: its event} of a run whose one weight was these numbers."""
    events = [audit.Event(value={"w": weight}, lines=[]) for weight in weights]
    return dict(enumerate(events))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([2, 3, 4, 5], "made 3 steps, not 2: is an epoch repeated?"),
        ([0, 1, 2, 3, 4], "it found no snapshot"),
        ([9, 9.5], "with weights that the whole run never had"),
    ],
)
def test_a_run_that_did_not_resume(weights, said):
    _, (_, seen) = audit.resumed(steps(0, 1, 2, 3, 4), steps(*weights))
    assert said in seen
