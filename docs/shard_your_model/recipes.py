"""What works with fully_shard, what raises an error, and what is wrong in silence.

torchrun --standalone --nproc-per-node=2 docs/shard_your_model/recipes.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see utils.py
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.block = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def encode(self, tokens):
        return self.block(self.embedding(tokens))

    def forward(self, tokens):
        return self.head(self.encode(tokens))


def say(topic, *facts):
    if dist.get_rank() == 0:
        print(f"{topic:10} |", *facts, flush=True)


def error_of(function, *arguments):
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return "no error"


def shard(model, *parts, **how):
    for part in [*parts, model]:
        fsdp.fully_shard(part, mesh=mesh, **how)
    return model


def clip():
    model = shard(torch.nn.Linear(4, 4))
    model(tokens.float()[None]).sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    parts = [gradient.to_local() for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(gradients)
    own = torch.nn.utils.get_total_norm(parts)
    say("clip", f"norm {norm.full_tensor():.3f}, of rank 0's part {own:.3f}")


def accumulate():
    model = shard(torch.nn.Linear(4, 4))
    plain = shard(torch.nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    for last in (False, True):  # two micro-batches
        model.set_requires_gradient_sync(last)
        model(tokens.float()[None]).sum().backward()
        plain(tokens.float()[None]).sum().backward()
        if not last:
            on = plain.weight.grad is not None
            off = model.weight.grad is not None
            say("accumulate", f"averaged after the first: {on}, sync off: {off}")
    once = model.weight.grad.full_tensor()
    twice = plain.weight.grad.full_tensor()
    say("accumulate", "after both, the same gradient:", once.equal(twice))


def tie():
    def train(model, part):
        shard(model, part)(tokens).sum().backward()

    model = Model()
    say("tied", f"embedding alone: {error_of(train, model, model.embedding)[:50]}")
    model = Model()
    train(model, model.block)
    say("tied", "block, then all:", model.head.weight is model.embedding.weight)


def mix():
    model = Model()
    shard(model, model.block)
    say("mixed", error_of(model.encode, tokens))
    fsdp.register_fsdp_forward_method(model, "encode")
    say("mixed", "after register_fsdp_forward_method:", error_of(model.encode, tokens))


def initialise(seeds):
    with torch.device("meta"):  # no rank ever holds the whole model
        model = torch.nn.Linear(4, 4)
    shard(model).to_empty(device="cpu")
    torch.manual_seed(seeds[dist.get_rank()])
    model.reset_parameters()
    weight = model.weight.full_tensor()
    same = weight[:2].equal(weight[2:])
    say("meta", f"seeds {seeds}: ranks have the same rows: {same}")


def load():
    model = shard(torch.nn.Linear(4, 4, bias=False))
    weight = torch.ones(4, 4)
    file = {"weight": weight} if dist.get_rank() == 0 else {}
    how = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, file, options=how)
    say("load", "from rank 0's file:", model.weight.full_tensor().equal(weight))


def compute_in_bfloat16(reduce_dtype):
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    model = shard(torch.nn.Linear(1, 1, bias=False), mp_policy=policy)
    source = 1.0 if dist.get_rank() == 0 else 0.001
    model(torch.tensor([[source]])).sum().backward()  # the gradients are 1 and 0.001
    mean = model.weight.grad.full_tensor().item()
    say("precision", f"reduced in {reduce_dtype}: {mean:.6f}, in {model.weight.dtype}")


def thaw(forward_first):
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    shard(model, *model, mp_policy=policy)
    rows = tokens.float()[None]
    if forward_first:
        with torch.no_grad():
            model(rows)
    for trained in (False, True):
        model[0].requires_grad_(trained)
        error = error_of(lambda: model(rows).sum().backward())
    say("thaw", f"after a forward: {forward_first}:", error[:66])


def save_on_rank_0():
    tensor = shard(torch.nn.Linear(4, 4)).state_dict()["weight"]
    local = tuple(tensor.to_local().shape)
    say("save", f"shape {tuple(tensor.shape)}, rank 0 holds {local}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    tokens = torch.arange(4)
    clip()
    accumulate()
    tie()
    mix()
    initialise(seeds=(0, 0))
    initialise(seeds=(0, 1))
    load()
    compute_in_bfloat16(torch.bfloat16)
    compute_in_bfloat16(torch.float32)
    thaw(forward_first=False)
    thaw(forward_first=True)
    save_on_rank_0()
    dist.destroy_process_group()
