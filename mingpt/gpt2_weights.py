"""GPT-2's weights in Hugging Face's format: load_gpt2 and save_gpt2.

The names of the weights are those of mingpt/model.py. Hugging Face keeps the matrices
of a block as (inputs, outputs), and nn.Linear as (outputs, inputs), so they are
transposed here. https://huggingface.co/docs/transformers/model_doc/gpt2
"""

import json
import os
import pickle
import re

import safetensors.torch
import torch

import utils
from mingpt.model import GPT, GPTConfig

# The files of a folder, in the order in which transformers looks for them. An index
# names the files of a model that is cut into several.
FILES = ["model.safetensors", "model.safetensors.index.json"]
FILES += ["pytorch_model.bin", "pytorch_model.bin.index.json"]

# What the two formats' readers raise for a file that is none, or was cut short.
DAMAGED = (
    safetensors.SafetensorError,
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    TypeError,
    ValueError,
)

# What GPT-2 is, where config.json may say something else.
GPT2 = {
    "model_type": ["gpt2"],
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],  # two names of one
    "layer_norm_epsilon": [1e-5],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "add_cross_attention": [False],
    "tie_word_embeddings": [True],
}


def load_gpt2(path, dropout=0.0, checkpoint=False):
    """A GPT with the weights of `path`, in float32, on the CPU.

    path: a .safetensors or .bin file, or a folder as save_pretrained() of transformers
    writes it. The size follows from the weights, and the number of heads from
    config.json beside them; without it, a head has 64 channels, as in every GPT-2.
    dropout, checkpoint: as in GPTConfig. What is no GPT-2 ends the program with one
    line and exit status 2.
    """
    path = os.fspath(path)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    state = {clean(name): x for name, x in read(find(path)).items()}
    state = {name: x for name, x in state.items() if not is_mask(name)}
    state.setdefault("lm_head.weight", state.get("transformer.wte.weight"))
    config = infer(state, read_config(folder), path)
    model = GPT(GPTConfig(**config, dropout=dropout, checkpoint=checkpoint))
    expected = model.state_dict()
    for name in sorted(expected.keys() | state.keys()):
        if name not in state:
            utils.fail(f"{path} has no {name}, which a GPT-2 has")
        if name not in expected:
            utils.fail(f"{path} has {name}, which no GPT-2 has")
        if is_transposed(name):
            state[name] = state[name].T
        found, wanted = tuple(state[name].shape), tuple(expected[name].shape)
        if found != wanted:
            utils.fail(f"{path}: {name} has the shape {found}, not {wanted}")
    if not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"]):
        utils.fail(f"{path}: the head is not the token embedding, as in GPT-2")
    model.load_state_dict(state)
    return model


def save_gpt2(model, path):
    """Write `model`, a GPT of mingpt/model.py, into the folder `path`.

    transformers.GPT2LMHeadModel.from_pretrained(path) loads it, and load_gpt2(path).
    """
    if not isinstance(model, GPT):
        raise TypeError(f"{type(model)} is not the GPT of mingpt/model.py")
    state = model.state_dict()
    del state["lm_head.weight"]  # the token embedding once more
    state = {n: x.T if is_transposed(n) else x for n, x in state.items()}
    state = {name: x.contiguous() for name, x in state.items()}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in GPT2.items()},
        "vocab_size": model.config.vocab_size,
        "n_positions": model.config.block_size,
        "n_embd": model.config.n_embd,
        "n_layer": model.config.n_layer,
        "n_head": model.config.n_head,
    }
    for part in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        config[part] = model.config.dropout
    for token in ("bos_token_id", "eos_token_id"):  # of GPT-2's own vocabulary
        config[token] = 50256 if model.config.vocab_size > 50256 else None
    os.makedirs(path, exist_ok=True)
    with utils.replacing(os.path.join(path, "config.json")) as file:
        file.write(json.dumps(config, indent=2).encode())
    with utils.replacing(os.path.join(path, "model.safetensors")) as file:
        file.write(safetensors.torch.save(state, metadata={"format": "pt"}))


def clean(name):
    """The name that a weight has in mingpt/model.py. Old files leave the start out."""
    known = name.startswith(("transformer.", "lm_head."))
    return name if known else f"transformer.{name}"


def is_mask(name):
    """Whether this is the causal mask, which old files keep among the weights."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))


def is_transposed(name):
    """Whether this is a matrix of a block."""
    return bool(re.search(r"(c_attn|c_proj|c_fc)\.weight$", name))


def find(path):
    """The file to read: `path`, or the first of FILES that the folder `path` has."""
    if not os.path.isdir(path):
        return path
    found = [x for x in FILES if os.path.exists(os.path.join(path, x))]
    if not found:
        utils.fail(f"{path} has no GPT-2: none of {', '.join(FILES)}")
    return os.path.join(path, found[0])


def read(path):
    """{name: tensor} of a file, or of all files that an index names."""
    if path.endswith(".json"):
        parts = sorted(set(read_json(path).get("weight_map", {}).values()))
        files = [read(os.path.join(os.path.dirname(path), x)) for x in parts]
        return {name: x for file in files for name, x in file.items()}
    try:
        if path.endswith(".safetensors"):
            return safetensors.torch.load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except OSError as error:
        utils.fail(f"{path} cannot be read: {error.strerror or error}")
    except DAMAGED:
        utils.fail(f"{path} holds no weights, or is damaged")


def read_json(path):
    """The content of a JSON file, a dict."""
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except OSError as error:
        utils.fail(f"{path} cannot be read: {error.strerror}")
    except (ValueError, TypeError):
        utils.fail(f"{path} is no JSON of this format, or is damaged")


def read_config(folder):
    """What config.json says, {} if there is none. It must say that this is GPT-2."""
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        return {}
    config = read_json(path)
    for name, values in GPT2.items():
        if config.get(name, values[0]) not in values:
            utils.fail(f"{path}: {name} is {config[name]!r}, in GPT-2 {values[0]!r}")
    return config


def infer(state, config, path):
    """The size of the model, by the names of GPTConfig."""
    try:
        vocab_size, n_embd = state["transformer.wte.weight"].shape
        block_size, _ = state["transformer.wpe.weight"].shape
    except (KeyError, ValueError):
        utils.fail(f"{path} has no token embedding and position embedding of a GPT-2")
    layers = {name.split(".")[2] for name in state if name.startswith("transformer.h.")}
    size = {"vocab_size": vocab_size, "n_positions": block_size}
    size |= {"n_embd": n_embd, "n_layer": len(layers)}
    for name, value in size.items():
        if config.get(name, value) != value:
            utils.fail(f"{path}: {name} is {value}, but {config[name]} in config.json")
    size["n_head"] = config.get("n_head", n_embd // 64)
    size["block_size"] = size.pop("n_positions")
    if not size["n_head"] or n_embd % size["n_head"]:
        utils.fail(f"{path}: {n_embd} channels make no {size['n_head']} equal heads")
    return size
