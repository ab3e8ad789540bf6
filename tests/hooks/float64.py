"""The model and all samples are float64, which autocast leaves alone."""


def double(x):
    return x.double() if x.is_floating_point() else x


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, *rest = load_train_objs()
    train_set, eval_set = (
        [tuple(map(double, sample)) for sample in data]
        for data in (train_set, eval_set)
    )
    return train_set, eval_set, model.double(), *rest
