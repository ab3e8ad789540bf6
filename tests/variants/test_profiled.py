"""The shares of a step: known ones are found, of each rank, and add up to the clock."""

import collections
import json

import pytest

from tests.conftest import once
from tests.helpers.checks import help_of, noted
from tools.run.launch import plant, run_script, train
from tools.scripts import ROOT

# ms that each part of a step takes at least
SLEEPS = {
    "data": 8,
    "forward": 12,
    "backward": 16,
    "optimizer": 10,
    "rest": 6,
}
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
    first, second = json.loads((folder / "my.json").read_text())["ms"]
    for part, slept in SLEEPS.items():
        assert first[part] >= slept, part
        assert second[part] >= slept, part
    assert second["forward"] >= SLEEPS["forward"] + LATE
    for ms, clock in zip((first, second), noted(folder, "clock"), strict=True):
        steps = [length for length in clock if length > 0]  # 0 where an epoch ends
        active = steps[7:12]  # after those of WAIT and WARM_UP
        assert sum(active) / 5 == pytest.approx(ms["step"], rel=0.05)
        assert sum(ms.values()) == pytest.approx(2 * ms["step"])
    waited = first["exposed communication"]
    assert waited > LATE / 2  # for the rank that is late


def test_one_file_and_one_table_of_all_ranks(profiled):
    folder, done = profiled()
    found = json.loads((folder / "my.json").read_text())
    head, *table = done.stdout.splitlines()[-8:]
    assert head.split() == ["share", "of", "a", "step", "rank", "0", "rank", "1"]
    first, second = found["ms"]
    for part, line in zip(first, table, strict=True):
        expected = part
        for ms in (first, second):
            share = ms[part] / ms["step"]
            expected += f" {ms[part]:.2f} ms {share:.0%}"
        assert " ".join(line.split()) == expected
    assert found["parameters"] == 20 * 20 + 20 + 1  # without the frozen bias
    assert noted(folder, "dumped", ranks=1) == [True]


def test_each_rank_has_a_trace_with_the_parts(profiled):
    folder, _ = profiled()
    for rank in (0, 1):
        trace = json.loads((folder / f"my.{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        took = collections.defaultdict(list)  # {part: ms}
        for event in trace["traceEvents"]:
            if event.get("ph") == "X":  # it has a length
                took[event["name"]].append(event["dur"] / 1e3)
        for part, slept in SLEEPS.items():
            long_enough = [ms for ms in took[part] if ms >= slept]
            assert len(long_enough) >= 5, (part, took[part])
        assert max(took["data"]) < 120  # without the evaluation


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
    assert "also write files that begin with this" in help_of(NAME, tmp_path)
    done = run_script(ROOT / NAME, 1, 1, "--trace", "no/trace", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "argument --trace: cannot write 'no/trace'" in done.stderr
