"""What readers bring, through every script, on two ranks and on three.

The cases are in tests/helpers/zoo.py. Those of optimizers run on two ranks
alone, because a step of one does not depend on how many ranks there are.

Each script trains each case for two epochs, on ranks that begin with other weights. The
outcome is "equal" if

- all ranks end with one model and one state of the optimizer,
- a run that resumes after the first epoch ends with the same bits (on three ranks, with
  the same numbers: the order of a sum depends on when DDP forms its buckets), and
- the model is that of the script's parent: at the root, and for real_job.py, that of
  one process.

Otherwise it is one of these, and `OTHERWISE` says why:

    differs             from the parent, by more than rounding
    ranks differ        from each other
    resumed, ...        after the first epoch: it differs, or an error
    saved, Refused: ... a snapshot was saved, and then the script refuses to go on
    Refused: ...        the line with which the script ends
    TypeError: ...      the first line of the first error
    not run             see NOT_RUN in tests/helpers/zoo.py

This prints them:

pytest -s tests/trunk/test_zoo.py::test_every_case
"""

import functools
import itertools
import json
import re
from pathlib import Path

import pytest

from tests.helpers.zoo import CASES, NAMES, NOT_RUN, OPTIMIZERS, momentum
from tools.run.launch import torchrun
from tools.scripts import ROOT, ancestry, calls

# {name in a row of OTHERWISE: scripts}
GROUPS = {
    "all": NAMES,
    "DDP": [name for name in NAMES if "DistributedDataParallel" in calls(name)],
    "sharded": ["variants/fsdp.py", "variants/sharded_snapshot.py"],
    **{Path(name).stem: [name] for name in NAMES},
}
# {name in a row of OTHERWISE: cases}
CASES_OF = {
    "optimizers": OPTIMIZERS,
    "unused": [case for case in CASES if case.startswith("unused")],
    **{case: [case] for case in CASES},
}
# {number of ranks: cases}
CASES_ON = {
    2: list(CASES),
    3: [case for case in CASES if CASES[case].optimizer is momentum],
}
# scripts | cases | how the outcome begins | why. Of several rows, the last one counts.
OTHERWISE = """
diloco | optimizers, SparseAdam | differs | it averages weights
diloco | SGD, ASGD, fused SGD, some parameters | equal | linear in the gradients
all | one head overflows | Refused: the loss is nan | NaN replaces no snapshot
all | loss with a parameter | Refused: the optimizer has parameters | DDP lacks them
all | LBFGS | TypeError: LBFGS.step() missing | it computes the loss, several times
DDP | unused | RuntimeError: Expected to have finished | DDP waits for it
DDP | unused in the last step | saved, Refused: layer.weight | 1 is saved
multigpu | BatchNorm | differs | each rank has statistics of its own
multigpu | random numbers | differs | each rank draws its own
multigpu, ddp2 | class weights, ignore_index | differs | each divides by its own
ddp_by_hand | unused on one rank | differs | ranks' models differ
ddp_by_hand | SparseAdam | RuntimeError: reshape is not | it flattens gradients
gradient_accumulation | BatchNorm, spectral_norm | differs | it sees parts
gradient_accumulation | random numbers, unused in the last step | differs | parts
gradient_accumulation | class weights, ignore_index | differs | parts divide
mixed_precision, real_job | SparseAdam | NotImplementedError | it takes the norm
ddp2 | output in an object | TypeError: empty_like() | it gathers tensors
real_job | output in an object | AttributeError: 'Output' | it counts right classes
sharded | tied across blocks | Refused: blocks share a parameter | it cuts rows
sharded | scalar | ValueError: fully_shard doesn't support scalar | it cuts rows
sharded | Adafactor, Muon, Rprop | RuntimeError: aten. | they look at whole matrices
sharded | fused SGD, SparseAdam | NotImplementedError | PyTorch's do not run on parts
sharded_snapshot | unused on all ranks | resumed, Checkpoint | no state was saved
tensor_parallel | Muon | differs | it rounds to bfloat16
tensor_parallel | fused SGD | NotImplementedError | PyTorch's does not run on parts
tensor_parallel | Adafactor, Rprop | RuntimeError: aten. | PyTorch's do not run on parts
preemptible | random numbers | differs | each step has its numbers
real_job | BatchNorm | differs | each rank has statistics of its own
real_job | random numbers | differs | each rank draws its own
real_job | class weights, ignore_index | differs | ranks divide alone
real_job | some parameters | resumed, it differs | gradients of others enter the norm
"""

HELP = """
If your script is right, say why in a row of OTHERWISE in this file. If nearly all cases
"differ", say so in EXCEPTIONS in tests/helpers/scripts.py. If a case hangs, add it to
NOT_RUN in tests/helpers/zoo.py. CONTRIBUTING.md says more: "Write the script".
"""


def expected():
    """{(script, case): (how the outcome begins, why)}, for those not equal."""
    found = {}
    for line in OTHERWISE.strip().splitlines():
        its_scripts, its_cases, outcome, why = line.split(" | ")
        for scripts in its_scripts.split(", "):
            for cases in its_cases.split(", "):
                pairs = itertools.product(GROUPS[scripts], CASES_OF[cases])
                found |= dict.fromkeys(pairs, (outcome, why))
    return found | {pair: ("not run", why) for pair, why in NOT_RUN.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """`outcomes(ranks)`: {script: {case: outcome}} of the scripts that are tested."""
    needed = set()
    for test in request.session.items:
        if test.originalname == "test_every_case":
            needed.update(ancestry(test.callspec.params["script"]))
    names = [name for name in NAMES if name in needed]

    @functools.cache
    def run(ranks):
        folder = tmp_path_factory.mktemp("zoo")
        torchrun(
            "-m",
            "tests.helpers.zoo",
            ",".join(names),
            ",".join(CASES_ON[ranks]),
            cwd=folder,
            nprocs=ranks,
            real=True,  # in one of some hundred process groups, a fork may hang
            timeout_s=1200,
            PYTHONPATH=ROOT,
        )
        return json.loads((folder / "outcomes.json").read_text())

    return run


@pytest.mark.waits
@pytest.mark.parametrize("ranks", CASES_ON)
@pytest.mark.parametrize("script", NAMES)
def test_every_case(outcomes, script, ranks):
    cases = CASES_ON[ranks]
    found = [outcomes(ranks)[script].get(case, "not run") for case in cases]
    print(f"\n{script}, {ranks} ranks: {found.count('equal')} of {len(cases)} equal")
    wrong = []
    for case, outcome in zip(cases, found, strict=True):
        begins, why = expected().get((script, case), ("equal", ""))
        if outcome != "equal":
            print(f"  {case}: {outcome} ({why})")
        if not outcome.startswith(begins):
            wrong.append(f"{case}: {outcome}, not {begins}")
    assert not wrong, "\n".join([*wrong, HELP])


@pytest.mark.text
def test_chapter_1_lists_the_cases_that_end_otherwise():
    page = (ROOT / "docs/1_single_gpu.md").read_text()
    section = re.search(r"(?s)## Check whether your model fits\n.*?\n## ", page)[0]
    _, _, *rows = re.findall(r"(?m)^\| ?([^|]+?) ?\|", section)
    listed = {case for row in rows for case in row.split(", ")}
    assert listed == {case for script, case in expected() if script == "multigpu.py"}
