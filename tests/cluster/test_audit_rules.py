"""What the audit calls equal, of weights that are written down here."""

import pytest

from cluster import audit


def steps(*weights):
    """{step: its event} of a run whose one weight was these numbers."""
    return {
        step: audit.Event(value={"w": weight}, rate=1, gradients=1, lines=[])
        for step, weight in enumerate(weights)
    }


WHOLE = steps(0.0, 1.0, 2.0, 3.0, 4.0)


def test_a_small_gap_between_ranks():
    assert audit.differences({"w": 1.0}, {"w": 1.00001}) == ["w"]
    assert audit.differences({"w": 1.0}, {"w": 1.0000001}) == []


def test_resumed_with_the_same_weights():
    assert audit.resumed(WHOLE, steps(2.0, 3.0, 4.0)) == (2, None)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([2.0, 3.0, 5.0], "w after step 4 was 4 in the whole run, 5 in the resumed"),
        ([2.0, 3.0, 4.0, 5.0], "made 3 steps, not 2: is an epoch repeated?"),
        ([0.0, 1.0, 2.0, 3.0, 4.0], "it did not resume all that it trains"),
        ([9.0, 9.5], "with weights that the whole run never had"),
    ],
)
def test_resumed_with_others(weights, said):
    _, (_, seen) = audit.resumed(WHOLE, steps(*weights))
    assert said in seen
