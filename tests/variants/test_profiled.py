"""The shares of a step: known ones are found, of each rank, and add up to the clock."""

import json

import pytest

from tests.conftest import once
from tools.run.launch import plant, run_script, train
from tools.scripts import ROOT

SLEEPS = {"data": 8, "forward": 12, "backward": 16, "optimizer": 10, "rest": 6}
LATE = 60  # ms more, of rank 1's forward pass
NAME = "variants/profiled.py"
CAP = ("Parallel(self.model)", "Parallel(self.model, bucket_cap_mb=0.0001)")
FEW = ("MyTrainDataset(2048)", "MyTrainDataset(256)")  # 4 steps in an epoch


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """`profiled(*hooks)`: (folder, Done) of six epochs of four steps on two ranks."""

    @once
    def run(*hooks):
        folder = tmp_path_factory.mktemp("profiled")
        script = plant(NAME, folder / "copy", CAP, FEW, hooks=["profiled", *hooks])
        env = {"SLEEPS": json.dumps(SLEEPS), "LATE": LATE}
        return folder, train(script, 6, 6, "--trace", "my", cwd=folder, **env)

    return run


WAYS = [pytest.param((), id="cpu"), pytest.param(("profiled:gpu",), id="gpu")]


@pytest.mark.waits
@pytest.mark.parametrize("hooks", WAYS)
def test_shares_are_those_planted_and_add_up_to_the_clock(profiled, hooks):
    folder, _ = profiled(*hooks)
    ranks = json.loads((folder / "my.json").read_text())["ms"]
    for rank, ms in enumerate(ranks):
        late = {"forward": LATE * rank}
        for part, slept in SLEEPS.items():
            assert ms[part] >= slept + late.get(part, 0), part
        clock = json.loads((folder / f"clock.{rank}.json").read_text())
        clock = [x for x in clock if x][7:12]
        assert sum(clock) / 5 == pytest.approx(ms["step"], rel=0.05)
        assert sum(ms.values()) == pytest.approx(2 * ms["step"])
    waited = ranks[0]["exposed communication"]
    assert waited > LATE / 2  # for the rank that is late


def test_one_file_and_one_table_of_all_ranks(profiled):
    folder, done = profiled()
    found = json.loads((folder / "my.json").read_text())
    head, *table = done.stdout.splitlines()[-8:]
    assert head.split() == ["share", "of", "a", "step", "rank", "0", "rank", "1"]
    for part, line in zip(found["ms"][0], table, strict=True):
        of_ranks = [(x[part], x[part] / x["step"]) for x in found["ms"]]
        cells = [word for x, y in of_ranks for word in f"{x:.2f} ms {y:.0%}".split()]
        assert line.split() == [*part.split(), *cells]
    assert found["parameters"] == 20 * 20 + 20 + 1  # without the frozen bias
    assert len(list(folder.glob("dumped.*"))) == 1


def test_each_rank_has_a_trace_with_the_parts(profiled):
    folder, _ = profiled()
    for rank in (0, 1):
        trace = json.loads((folder / f"my.{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        spans = [x for x in trace["traceEvents"] if x.get("ph") == "X"]
        for part, slept in SLEEPS.items():
            took = [x["dur"] / 1e3 for x in spans if x["name"] == part]
            assert len([x for x in took if x >= slept]) >= 5, (part, took)
            assert part != "data" or max(took) < 120  # without the evaluation


def test_too_few_steps_for_a_profile(runs, tmp_path):
    script = plant(NAME, tmp_path / "copy", FEW)
    done = train(script, 2, 2, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "no profile: it takes 12 steps"
    assert not list(tmp_path.glob("*.json"))


def test_the_first_step_can_be_measured(tmp_path):
    one = ("WAIT = 5", "WAIT = 0"), ("WARM_UP = 2", "WARM_UP = 0")
    script = plant(NAME, tmp_path / "copy", FEW, *one, ("ACTIVE = 5", "ACTIVE = 1"))
    done = train(script, 1, 1, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].startswith("step ")
    assert not list(tmp_path.glob("*.json"))  # they are for --trace


def test_help_and_a_folder_that_is_not_there(tmp_path):
    done = run_script(ROOT / NAME, "--help", cwd=tmp_path)
    assert "also write files that begin with this" in " ".join(done.stdout.split())
    done = run_script(ROOT / NAME, 1, 1, "--trace", "no/trace", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "argument --trace: cannot write 'no/trace'" in done.stderr
