"""Record what two ranks do in each step, with and without three lines of multigpu.py.

    python -m tools.site.slow_motion

The start page shows the record in slow motion: templates/slow_motion.json.
"""

import itertools
import json
import tempfile
from pathlib import Path

import torch

from tools.run.launch import start
from tools.scripts import ROOT
from tools.site.home import SWITCHES

RECORD = ROOT / "tools/site/templates/slow_motion.json"
# In all runs: few samples, and a rate with which few steps are enough.
SCENE = [("MyTrainDataset(2048)", "MyTrainDataset(16)"), ("lr=0.001", "lr=0.02")]


def note_steps(script):
    """ranks.json: of each rank, what it did in each step, and the losses held out.

    A step: its samples, the gradient of the first weight before and after the ranks may
    have averaged it, and how far apart the ranks' weights then are: the norm of the
    difference of all 20. multigpu.py would stop after an epoch in which they became
    different; this hook goes on, as most scripts do.
    """
    utils = script["utils"]
    taken = []
    steps = []
    held_out = []

    class Dataset(utils.MyTrainDataset):
        def __getitem__(self, index):
            taken.append(index)
            return super().__getitem__(index)

    class Trainer(script["Trainer"]):
        def _run_batch(self, source, targets):
            weight = self.model.weight
            gradients = []
            handle = weight.register_hook(gradients.append)  # before they are averaged
            loss = super()._run_batch(source, targets)
            handle.remove()
            first = [gradient[0, 0] for gradient in (*gradients, weight.grad)]
            apart = torch.dist(*utils.gather(weight))
            numbers = [round(number.item(), 4) for number in (*first, apart)]
            steps.append([taken[-len(source) :], *numbers])
            return loss

    def check_state(losses, *rest):
        held_out.append(round(losses[1], 4))
        ranks = utils.gather([steps, held_out])
        Path("ranks.json").write_text(json.dumps(ranks))  # the same on each rank

    utils.MyTrainDataset = Dataset
    utils.check_state = check_state
    script["Trainer"] = Trainer


def record():
    """{switches that are off, such as "101": what the ranks noted, or the error}"""
    found = {}
    for off in itertools.product("01", repeat=len(SWITCHES)):
        changes = [*SCENE, *itertools.compress(SWITCHES, map(int, off))]
        with tempfile.TemporaryDirectory() as name:
            how = {"cwd": Path(name), "changes": changes, "hooks": [note_steps]}
            done = start("multigpu.py", 3, 3, batch=8, **how).finish()
            key = "".join(off)
            if done.returncode:
                found[key] = done.stderr.strip().splitlines()[-1]
            else:
                found[key] = json.loads(Path(name, "ranks.json").read_text())
    return found


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record()) + "\n")
