"""Real data by changing only `load_train_objs`: handwritten digits, on every rung.

1797 scans of 8 x 8 pixels that scikit-learn brings along (Alpaydin and Kaynak, 1998,
https://archive.ics.uci.edu/dataset/80). Needs `pip install -r tests/requirements.txt`.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from ladder.rungs import RUNGS
from proofs.launch import plant, train
from proofs.results import load, losses

sklearn = pytest.importorskip("sklearn", reason="needs tests/requirements.txt")

DIGITS = """def load_train_objs():
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset, random_split

    torch.manual_seed(0)
    source, targets = load_digits(return_X_y=True)
    source, targets = torch.tensor(source / 16).float(), torch.tensor(targets)
    data = TensorDataset(source, targets)
    train_set, eval_set = random_split(data, [1437, 360])
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )
    make_optimizer = functools.partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3
    )
    return train_set, eval_set, model, F.cross_entropy, make_optimizer"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(name)`: (accuracy on the held-out digits, losses) of a rung."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("digits")
            script = plant(name, folder, (function("load_train_objs", name), DIGITS))
            batch = 60 if RUNGS[name] is None else 30
            done = train(script, 40, 40, "--batch-size", batch, cwd=folder)
            scope = {"torch": torch, "F": F, "functools": functools}
            exec(DIGITS, scope)
            _, eval_set, model, _, _ = scope["load_train_objs"]()
            model.load_state_dict(load(folder / "snapshot.pt")["MODEL_STATE"])
            source, targets = eval_set[:]
            right = model(source).argmax(1) == targets
            made[name] = right.double().mean().item(), losses(done)
        return made[name]

    return get


@pytest.mark.parametrize("name", RUNGS)
def test_digits(trained, name):
    """At least 97 % of the held-out digits are read, as many as on every rung."""
    accuracy, curve = trained(name)
    alone, curve_alone = trained("single_gpu.py")
    print(f"{name}: {accuracy:.1%} of 360 held-out digits")
    assert accuracy >= 0.97
    assert accuracy == alone
    # Rounding differs and ReLU makes it grow, so only the first epochs' losses agree.
    torch.testing.assert_close(curve[:10], curve_alone[:10], rtol=1e-3, atol=1e-4)
