"""The model and all samples are float64, which autocast leaves alone."""

import torch
from torch.utils.data import Dataset


class Float64(Dataset):
    """`data` in float64."""

    def __init__(self, data):
        self.data = data
        if hasattr(data, "noise_floor"):
            self.noise_floor = data.noise_floor

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        pair = self.data[index]
        return tuple(x.double() if torch.is_floating_point(x) else x for x in pair)


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, *rest = load_train_objs()
    return Float64(train_set), Float64(eval_set), model.double(), *rest
