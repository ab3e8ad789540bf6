"""The rung's model, which keeps something that is no tensor in its state_dict."""

import torch


class Model(torch.nn.Sequential):
    def get_extra_state(self):
        return {"version": "a"}

    def set_extra_state(self, state):
        assert state == {"version": "a"}


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, *rest = load_train_objs()
    return train_set, eval_set, Model(model), *rest
