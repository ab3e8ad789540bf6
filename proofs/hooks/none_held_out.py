"""Of the samples that are held out none is left."""

from torch.utils.data import Subset


def around_load_train_objs(load_train_objs):
    train_set, eval_set, *rest = load_train_objs()
    return train_set, Subset(eval_set, []), *rest
