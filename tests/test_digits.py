"""Real data by changing only `load_train_objs`: handwritten digits, on every rung.

The data and the model are those of proofs/hooks/digits.py. Needs
`pip install -r tests/requirements.txt`.
"""

import pytest
import torch

from proofs.hooks import digits
from proofs.launch import (
    OF_THE_TRUNKS_TASK,
    batch_size,
    hooks_to_compare,
    plant,
    train,
)
from proofs.results import load, losses

sklearn = pytest.importorskip("sklearn", reason="needs tests/requirements.txt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(name)`: (accuracy on the held-out digits, losses) of a rung.

    `hooks`: others to attach after the one with the digits.
    """
    made = {}

    def get(name, hooks=()):
        if (name, hooks) not in made:
            folder = tmp_path_factory.mktemp("digits")
            script = plant(name, folder, hooks=["digits", *hooks])
            options = ("--batch-size", batch_size(name, 60))
            done = train(script, 40, 40, *options, cwd=folder)
            _, eval_set, model, _, _ = digits.around_load_train_objs(None)
            model.load_state_dict(load(folder / "snapshot.pt")["MODEL_STATE"])
            source, targets = eval_set[:]
            right = model(source).argmax(1) == targets
            made[name, hooks] = right.double().mean().item(), losses(done)
        return made[name, hooks]

    return get


@pytest.mark.parametrize("name", OF_THE_TRUNKS_TASK)
def test_digits(trained, name):
    """At least 97 % of the held-out digits are read, as many as on every rung.

    (A rung with a task of its own says in its own tests how much can be reached.)
    """
    hooks = hooks_to_compare(name)
    accuracy, curve = trained(name, hooks)
    alone, curve_alone = trained("single_gpu.py", hooks)
    print(f"{name}: {accuracy:.1%} of 360 held-out digits")
    assert accuracy >= 0.97
    assert accuracy == alone
    # Rounding differs and ReLU makes it grow, so only the first epochs' losses agree.
    torch.testing.assert_close(curve[:10], curve_alone[:10], rtol=1e-3, atol=1e-4)
