"""A model that fills several of DDP's buckets, as `load_train_objs` of any rung.

LAYER_SIZES are the numbers of its inputs and of each linear layer's outputs. There are
TRAIN_SAMPLES samples.
"""

import itertools
import os

import torch

import utils


def around_load_train_objs(load_train_objs):
    _, eval_set, _, *rest = load_train_objs()
    sizes = [int(size) for size in os.environ["LAYER_SIZES"].split(",")]
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    train_set = utils.MyTrainDataset(int(os.environ["TRAIN_SAMPLES"]))
    return train_set, eval_set, torch.nn.Sequential(*layers[:-1]), *rest
