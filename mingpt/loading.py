"""Make the model and the optimizer that the command line describes."""

import importlib

import utils
from mingpt import cpu_attention
from mingpt.options import SIZES


def load_model(args, vocab_size, device):
    """The model that `args` describe, on the CPU, and its optimizer."""
    try:
        module = importlib.import_module(args.model)
    except ModuleNotFoundError as error:
        utils.error(f"--model {args.model}: {error}")
    sizes = {name: getattr(args, name) for name in SIZES} | {"vocab_size": vocab_size}
    more = {"dropout": args.dropout, "checkpoint": args.checkpoint}
    slow = (device.type, args.precision) == ("cpu", "bf16")
    if slow and callable(getattr(module.GPTConfig, "attention", None)):  # it can choose
        more["attention"] = cpu_attention.attention
    try:
        if args.init_from:
            from mingpt.gpt2_weights import load_gpt2  # it needs safetensors

            model = load_gpt2(args.init_from, sizes, **more)
        else:
            model = module.GPT(module.GPTConfig(**sizes, **more))
    except ValueError as error:
        utils.error(error)
    return model, module.make_optimizer(model, args.lr, args.weight_decay)
