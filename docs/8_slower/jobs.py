"""What the experiments of chapter 8 train, and what makes them slow."""

import time

import torch


def large(width=512):
    """20 features to 1 output; 1.6 million parameters."""
    parts = [torch.nn.Linear(20, width), torch.nn.ReLU()]
    for _ in range(6):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts, torch.nn.Linear(width, 1))


class Decoded(torch.utils.data.Dataset):
    """`data`, but each sample takes half a millisecond, like a file on a slow disk."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.0005)
        return self.data[index]
