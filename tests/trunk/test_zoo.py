"""What readers bring, through every script, on two ranks and on three.

The cases are in tests/helpers/zoo.py.

Each script trains each case for two epochs, on ranks that begin with other weights. The
outcome is "equal" if

- all ranks end with one model and one state of the optimizer,
- a run that resumes after the first epoch ends with the same bits (on three ranks, with
  the same numbers: the order of a sum depends on when DDP forms its buckets), and
- the model is that of the script's parent: at the root, and for real_job.py, that of
  one process.

`OTHERWISE` has all other outcomes, and why. This prints them:

pytest -s tests/trunk/test_zoo.py::test_every_case
"""

import itertools
import json

import pytest

from tests.helpers.zoo import CASES, NAMES, NOT_MLP, OPTIMIZERS
from tools.run.processes import Program
from tools.scripts import ROOT, calls

GROUPS = {
    "all": NAMES,
    "DDP": [x for x in NAMES if "DistributedDataParallel" in calls(x)],
    "sharded": ["variants/fsdp.py", "variants/sharded_snapshot.py"],
} | {x.rpartition("/")[2].removesuffix(".py"): [x] for x in NAMES}
UNUSED = [case for case in CASES if case.startswith("unused")]
CASES_OF = {"optimizers": OPTIMIZERS, "unused": UNUSED, "others": NOT_MLP} | {
    x: [x] for x in CASES
}
# scripts | cases | how the outcome begins | why. Of several rows, the last one counts.
OTHERWISE = """
diloco | optimizers | differs | it averages weights, not gradients
diloco | SGD, ASGD, fused SGD, some parameters | equal | linear in the gradients
all | one head overflows | Refused: epoch 1: loss nan | NaN replaces no snapshot
all | loss with a parameter | Refused: the optimizer has parameters | DDP lacks them
all | LBFGS | TypeError: LBFGS.step() missing | it computes the loss, several times
DDP | unused | RuntimeError: Expected to have finished | DDP waits for it
DDP | unused in the last step | saved, Refused: epoch 2: loss | ranks differ; 1 is saved
multigpu | BatchNorm | differs | each rank has statistics of its own
multigpu | dropout | differs | each rank draws numbers of its own
multigpu, ddp2 | class weights | differs | each rank divides by its own sum of weights
multigpu, ddp2 | ignore_index | differs | each rank divides by its own count
ddp_by_hand | unused on one rank | differs | the other rank has another model
ddp_by_hand | SparseAdam | RuntimeError: reshape is not | it flattens gradients
gradient_accumulation | BatchNorm, spectral_norm | differs | they see parts of a batch
gradient_accumulation | average of the weights, extra state | differs | they count parts
gradient_accumulation | unused in the last step | differs | it counts parts, too
gradient_accumulation | class weights, ignore_index | differs | parts divide by theirs
mixed_precision | float32, mixed dtypes, mixed in the root | differs | autocast rounds
mixed_precision, real_job | SparseAdam | NotImplementedError | it takes the norm
diloco | unused | RuntimeError: a parameter has no gradient | as DDP
sharded | unused | RuntimeError: a parameter has no gradient | as DDP
sharded, preemptible | unused on one rank | not run | it waits until a time-out
sharded | tied across blocks, scalar, zero-size | Refused: FSDP2 refuses | it cuts rows
sharded | mixed in the root | Refused: FSDP2 refuses | it sends a block as one tensor
sharded | Adafactor | Refused: Adafactor needs whole | its steps look at a whole matrix
sharded | Muon | Refused: Muon needs whole | its steps look at a whole matrix
sharded | Rprop | Refused: Rprop needs whole | PyTorch's does not run on parts
sharded | fused SGD, SparseAdam | NotImplementedError | PyTorch's do not run on parts
tensor_parallel | others | not run | its PLAN names the layers of an MLP
tensor_parallel | Muon | differs | it rounds to bfloat16, and sums in another order
tensor_parallel | fused SGD | NotImplementedError | PyTorch's does not run on parts
tensor_parallel | Adafactor, Rprop | RuntimeError: aten. | PyTorch's do not run on parts
preemptible | dropout | differs | its random numbers follow from the step
real_job | BatchNorm | differs | each rank has statistics of its own
real_job | dropout | differs | each rank draws numbers of its own
real_job | class weights, ignore_index | differs | each rank divides by its own
real_job | some parameters | resumed, it differs | gradients of others enter the norm
"""


def expected():
    """{(script, case): (how the outcome begins, why)}, for those in OTHERWISE."""
    found = {}
    for line in OTHERWISE.strip().splitlines():
        scripts, cases, outcome, why = line.split(" | ")
        scripts = [x for name in scripts.split(", ") for x in GROUPS[name]]
        cases = [x for name in cases.split(", ") for x in CASES_OF[name]]
        found |= dict.fromkeys(itertools.product(scripts, cases), (outcome, why))
    return found


@pytest.mark.waits
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_case(ranks, tmp_path):
    words = f"torchrun --standalone --nproc-per-node={ranks} -m tests.helpers.zoo"
    # Not a fork: in one of some hundred process groups, it may hang.
    program = Program(words.split(), tmp_path, real=True, PYTHONPATH=ROOT)
    done = program.finish(timeout_s=500)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    wrong = []
    for script in NAMES:
        found = [outcomes[script].get(case, "not run") for case in CASES]
        equal = f"{found.count('equal')} of {len(CASES)} equal"
        print(f"\n{script}, {ranks} ranks: {equal}")
        for case, outcome in zip(CASES, found, strict=True):
            begins, why = expected().get((script, case), ("equal", ""))
            if outcome != "equal":
                print(f"  {case}: {outcome} ({why})")
            if not outcome.startswith(begins):
                wrong.append(f"{script}, {case}: {outcome}, not {begins}")
    assert not wrong
