"""Does a model that is split compute what it computes whole? On CPUs, in float64."""

import fnmatch
import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, parallel
from torch.profiler import ProfilerActivity, profile


def check(whole, model, convert, plan, source, targets, loss_fn, heads=()):
    """Compare what each module returns, and each gradient. Status 1 if some differ.

    convert: {name: value} of `whole` to {name: value} of `model`
    heads: parts of the names of norms of heads, whose gradients your loop must add up
    """
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole.double().eval()  # without dropout
    model.double().eval()
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, std=0.1)  # a weight of zeros would hide mistakes
    model.load_state_dict(convert(whole.state_dict()))
    layers = [name for name, _ in model.named_modules()]
    for name in plan:
        assert fnmatch.filter(layers, name), f"{name} is no layer"
    parallel.parallelize_module(model, mesh, plan)
    outputs, gradients = run(whole, source, targets, loss_fn)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found, found_gradients = run(model, source, targets, loss_fn)
    for name, gradient in found_gradients.items():
        if any(part in name for part in heads):  # each rank has that of its own heads
            dist.all_reduce(gradient)
    messages = sum(event.name == "gloo:all_reduce" for event in seen.events())
    weights = model.named_parameters()
    left = [name for name, weight in weights if not isinstance(weight, DTensor)]
    wrong = differing(found, outputs)
    wrong_gradients = differing(found_gradients, convert(gradients))
    if dist.get_rank() == 0:
        print("parameters that are not in the plan:", len(left), *left)
        print(f"{messages} messages in a step")
        print("outputs that differ:", len(wrong), *wrong[:1])
        print("gradients that differ:", len(wrong_gradients), *wrong_gradients)
    vars(mesh).clear()  # PyTorch keeps it, and it would keep the process group
    gc.collect()
    dist.destroy_process_group()
    sys.exit(bool(wrong or wrong_gradients))


def run(model, source, targets, loss_fn):
    """({module: its output}, in the order of the pass, {parameter: its gradient})."""
    outputs = {}
    for name, module in model.named_modules():
        name = name or "the model"
        module.register_forward_hook(
            lambda module, inputs, output, name=name: outputs.update({name: output})
        )
    loss_fn(model(source), targets).backward()
    gradients = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient"
        gradients[name] = weight.grad
    return outputs, gradients


def differing(found, expected):
    """The names of the tensors that differ. A layer's part of an output is left out."""
    names = []
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, DTensor):
            value = value.full_tensor()
        other = expected.get(name, value)
        whole = value.shape == other.shape
        if whole and not torch.allclose(value, other, rtol=1e-4, atol=1e-7):
            names.append(name)
    return names
