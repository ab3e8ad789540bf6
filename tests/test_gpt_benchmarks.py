"""benchmarks.gpt measures the steps of mingpt.train, and notices another training."""

import math

import pytest

from benchmarks import gpt
from mingpt import data
from proofs import warm  # noqa: F401  no pool of threads exists when a process forks

ROUNDS = 2


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    data.prepare(cache=str(folder / "tokens"))
    steps = 2
    return gpt.Setting("a", "cpu", 1, 2, steps, (ROUNDS + 2) * steps, str(folder))


@pytest.fixture
def race(monkeypatch, setting):
    monkeypatch.setattr(gpt, "START", "fork")  # a fork has imported torch already
    return lambda versions: gpt.race(versions, setting, ROUNDS)


plain = gpt.Version("plain", "fp32"), 1
# Compiling takes longer than all else here.
mingpt = gpt.Version("mingpt", "fp32", without=frozenset({"compile"})), 1


def test_versions_train_the_same(race, setting):
    versions = {"plain": plain, "mingpt": mingpt}
    turns = race(versions)
    assert [len(its) for its in turns.values()] == [ROUNDS, ROUNDS]
    for theirs, ours in zip(*turns.values(), strict=True):
        assert theirs.loss == pytest.approx(ours.loss, abs=1e-5)
        assert theirs.seconds > 0 and ours.seconds > 0
    assert turns["plain"][1].loss < turns["plain"][0].loss < math.log(120)


def test_the_peak_of_memory_has_all_that_is_kept(setting):
    """In a new process: a fork has the memory that others have freed."""
    turns = gpt.race({"plain": plain}, setting, ROUNDS)
    weights = 4 * 4 * 800_000  # with gradients and two moments, in bytes
    assert turns["plain"][-1].peak_bytes > weights


def test_transformers_trains_the_same(race):
    pytest.importorskip("transformers", reason="it is what is compared with")
    turns = race({"plain": plain, "HF": (gpt.Version("transformers", "fp32"), 1)})
    assert turns["plain"][-1].loss == pytest.approx(turns["HF"][-1].loss, abs=1e-5)


def test_another_training_is_noticed(race, monkeypatch, capsys):
    sees_the_future = gpt.F.scaled_dot_product_attention
    monkeypatch.setattr(
        gpt, "kernel_attention", lambda q, k, v, dropout: sees_the_future(q, k, v)
    )
    monkeypatch.setitem(gpt.TOLERANCE, "fp32", 1e-5)
    with pytest.raises(SystemExit, match="the loss of mingpt is .* off that of plain"):
        race({"plain": plain, "mingpt": mingpt})


def test_two_processes_and_a_profile(monkeypatch, setting):
    monkeypatch.setattr(gpt, "START", "fork")
    with gpt.contestants({"two": (mingpt[0], 2)}, setting) as found:
        first, second = found["two"].turn(setting.steps)
        assert first.loss == second.loss, "both know the mean over both"
        shares, _ = found["two"].turn(-setting.steps)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["matrix products"] > 0.1
    assert shares["attention"] > 0
    assert shares["optimizer and clipping"] > 0


@pytest.mark.parametrize("name", gpt.MEANS)
def test_each_means_can_be_left_out(name, setting):
    version = gpt.Version("mingpt", "bf16", without=frozenset({name}))
    words = gpt.arguments(version, setting)
    typed = dict(zip(words[::2], words[1::2], strict=True))
    assert typed["--compile"] == ("off" if name == "compile" else "on")
    assert typed["--precision"] == ("fp32" if name == "bf16" else "bf16")
    assert (gpt.MEANS[name][1] is None) == (name in ("compile", "bf16"))
