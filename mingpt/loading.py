"""Make the model that the configuration describes."""

import importlib

import torch

import utils
from mingpt import cpu_attention, options


def load_model(configuration, vocab_size):
    """The whole model, on the CPU.

    With --compile on, the model is compiled. Then this also sets PyTorch's flag for
    deterministic algorithms, which holds for the whole process.
    """
    settings = configuration.model
    run = configuration.run
    try:
        module = importlib.import_module(settings.module)
    except ModuleNotFoundError as error:
        utils.error(f"--model {settings.module}: {error}")
    sizes = {name: getattr(settings, name) for name in options.SIZES}
    sizes["vocab_size"] = vocab_size
    more = {"dropout": settings.dropout, "checkpoint": settings.checkpoint}
    can_choose = callable(getattr(module.GPTConfig, "attention", None))
    if can_choose and run.device.type == "cpu" and run.precision == "bf16":
        more["attention"] = cpu_attention.attention  # PyTorch's is slow there
    try:
        if settings.init_from:
            from mingpt.gpt2_weights import load_gpt2  # it needs safetensors

            model = load_gpt2(settings.init_from, sizes, **more)
        else:
            model = module.GPT(module.GPTConfig(**sizes, **more))
    except ValueError as error:
        utils.error(error)
    if run.compile:
        # Or threads add up an embedding's gradient in the order in which they come.
        on_cpu = run.device.type == "cpu"
        torch.use_deterministic_algorithms(on_cpu, warn_only=True)
        model.compile(dynamic=False, options=options.compile_options(run.device))
    return model
