"""Handwritten digits and a network that reads them, as `load_train_objs` of any rung.

1797 scans of 8 x 8 pixels that scikit-learn brings along (Alpaydin and Kaynak, 1998,
https://archive.ics.uci.edu/dataset/80).
"""

import functools

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset, random_split


def around_load_train_objs(_):
    from sklearn.datasets import load_digits

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
    return train_set, eval_set, model, F.cross_entropy, make_optimizer
