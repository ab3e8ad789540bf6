"""Make the model and the optimizer that the command line describes."""

import importlib

import torch

import utils
from mingpt import cpu_attention, options


def load_model(args, vocab_size, device):
    """The model that `args` describe, on the CPU, and its optimizer.

    With --compile on, the model is compiled. Then this also sets PyTorch's flag for
    deterministic algorithms, which holds for the whole process.
    """
    try:
        module = importlib.import_module(args.model)
    except ModuleNotFoundError as error:
        utils.error(f"--model {args.model}: {error}")
    sizes = {name: getattr(args, name) for name in options.SIZES}
    sizes["vocab_size"] = vocab_size
    more = {"dropout": args.dropout, "checkpoint": args.checkpoint}
    can_choose = callable(getattr(module.GPTConfig, "attention", None))
    if can_choose and device.type == "cpu" and args.precision == "bf16":
        more["attention"] = cpu_attention.attention  # PyTorch's is slow there
    try:
        if args.init_from:
            from mingpt.gpt2_weights import load_gpt2  # it needs safetensors

            model = load_gpt2(args.init_from, sizes, **more)
        else:
            model = module.GPT(module.GPTConfig(**sizes, **more))
    except ValueError as error:
        utils.error(error)
    if args.compile == "on":
        # Or threads add up an embedding's gradient in the order in which they come.
        torch.use_deterministic_algorithms(device.type == "cpu", warn_only=True)
        model.compile(dynamic=False, options=options.compile_options(device))
    return model, module.make_optimizer(model, args.lr, args.weight_decay)
