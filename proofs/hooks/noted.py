"""A data set that notes which samples are taken, for hooks that ask."""

from torch.utils.data import Dataset


class Noted(Dataset):
    """`data` with the same samples; `seen` is the list of indices taken, in order."""

    def __init__(self, data):
        self.data, self.seen = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.seen.append(index)
        return self.data[index]
