"""benchmarks.gpt measures the steps of mingpt.train."""

import math
from argparse import Namespace

import pytest

from benchmarks import gpt
from mingpt import data

pytestmark = pytest.mark.waits


def test_versions_train_the_same(tmp_path):
    pytest.importorskip("transformers", reason="it is what is compared with")
    data.prepare(cache=str(tmp_path / "tokens"))
    of_a = {"preset": "nano", "batch_size": 12, "vocab_size": None}
    how = {"device": "cpu", "threads": 1, "rounds": 2, "steps": 2, "folder": tmp_path}
    kinds = "plain loop", "transformers", "mingpt"
    # Compiling takes longer than all else here.
    versions = {kind: gpt.Version(kind, "fp32", False) for kind in kinds}
    turns = gpt.race(versions, Namespace(**how, **of_a))
    for theirs, hugging_face, ours in zip(*turns.values(), strict=True):
        assert theirs.loss == pytest.approx(ours.loss, abs=1e-5)
        assert theirs.loss == pytest.approx(hugging_face.loss, abs=1e-5)
        assert theirs.tokens == ours.tokens == 2 * 12 * 64
        assert theirs.seconds > 0 and ours.seconds > 0
    first, second = turns["plain loop"]
    assert second.loss < first.loss < math.log(120)
