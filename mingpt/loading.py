"""Make the model that the configuration describes."""

import importlib

import torch

import utils
from mingpt import options


def load_model(configuration, vocab_size):
    """The whole model, on the CPU.

    With --compile on, the model is compiled. Then this also sets PyTorch's flag for
    deterministic algorithms, which holds for the whole process.
    """
    module = importlib.import_module(configuration.module)
    sizes = {name: getattr(configuration, name) for name in options.SIZES}
    sizes["vocab_size"] = vocab_size
    more = {"dropout": configuration.dropout, "checkpoint": configuration.checkpoint}
    if configuration.init_from:
        from mingpt.gpt2_weights import load_gpt2  # it needs safetensors

        model = load_gpt2(configuration.init_from, **more)
        for name, size in sizes.items():
            own = getattr(model.config, name)
            if size is not None and size != own:
                utils.error(f"{configuration.init_from} has {name} {own}, not {size}")
    else:
        model = module.GPT(module.GPTConfig(**sizes, **more))
    if configuration.compile:
        # Or threads add up an embedding's gradient in the order in which they come.
        on_cpu = configuration.device.type == "cpu"
        torch.use_deterministic_algorithms(on_cpu, warn_only=True)
        model.compile(dynamic=False)
    return model
