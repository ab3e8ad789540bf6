"""The model and all samples are float64, which autocast leaves alone."""


def to_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def double(data):
    return [tuple(map(to_double, sample)) for sample in data]


def around_load_train_objs(load_train_objs):
    train_set, eval_set, model, *rest = load_train_objs()
    return double(train_set), double(eval_set), model.double(), *rest
