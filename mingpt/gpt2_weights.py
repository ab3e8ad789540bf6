"""GPT-2's weights in Hugging Face's format: load_gpt2 and save_gpt2.

The names of the weights are those of mingpt/model.py. Hugging Face keeps the matrices
of a block as (inputs, outputs), and nn.Linear as (outputs, inputs), so they are
transposed here. https://huggingface.co/docs/transformers/model_doc/gpt2
"""

import json
import os
import re

import safetensors.torch

import utils
from mingpt.model import GPT, GPTConfig

# What GPT-2 is, where config.json may say something else.
GPT2 = {
    "model_type": ["gpt2"],
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],  # two names of one
    "layer_norm_epsilon": [1e-5],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "tie_word_embeddings": [True],
}


def load_gpt2(path, sizes=None, **more):
    """A GPT with the weights of `path`, in float32, on the CPU.

    path: a .safetensors file, or a folder as save_pretrained() of transformers writes
    it. The size follows from the weights, and the number of heads from config.json
    beside them; without it, a head has 64 channels, as in every GPT-2. What is no GPT-2
    ends the program with one line and exit status 2, as does another size than one of
    `sizes`, {name: number or None}. more: other fields of GPTConfig.
    """
    path = os.fspath(path)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    try:
        state = read(path)
        config = read_config(os.path.join(folder, "config.json"))
        vocab_size, n_embd = state["transformer.wte.weight"].shape
        layers = {x.split(".")[2] for x in state if x.startswith("transformer.h.")}
        own = {
            "block_size": len(state["transformer.wpe.weight"]),
            "vocab_size": vocab_size,
            "n_layer": len(layers),
            "n_head": config.get("n_head", n_embd // 64),
            "n_embd": n_embd,
        }
        model = GPT(GPTConfig(**own, **more))
        model.load_state_dict(state)
    except Exception as error:  # each format has errors of its own
        utils.error(f"{path} holds no GPT-2: {type(error).__name__}: {error}")
    for name, value in (sizes or {}).items():
        if value not in (None, own[name]):
            utils.error(f"{path} has {name} {own[name]}, not {value}")
    return model


def save_gpt2(model, path):
    """Write `model`, a GPT of mingpt/model.py, into the folder `path`.

    transformers.GPT2LMHeadModel.from_pretrained(path) loads it, and load_gpt2(path).
    """
    if not isinstance(model, GPT):
        raise TypeError(f"{type(model)} is not the GPT of mingpt/model.py")
    state = {k: transpose(k, x).contiguous() for k, x in model.state_dict().items()}
    del state["lm_head.weight"]  # the token embedding once more
    c = model.config
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in GPT2.items()},
        **{"vocab_size": c.vocab_size, "n_positions": c.block_size},
        **{"n_embd": c.n_embd, "n_layer": c.n_layer, "n_head": c.n_head},
        **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], c.dropout),
    }
    for token in ("bos_token_id", "eos_token_id"):  # of GPT-2's own vocabulary
        config[token] = 50256 if c.vocab_size > 50256 else None
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    file = os.path.join(path, "model.safetensors")
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})


def read(path):
    """The state_dict of a file, with the names and shapes of mingpt/model.py."""
    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    state = {}
    for name, x in safetensors.torch.load_file(path).items():
        if not name.startswith(("transformer.", "lm_head.")):  # in old files
            name = f"transformer.{name}"
        if not name.endswith((".attn.bias", ".attn.masked_bias")):  # old files' masks
            state[name] = transpose(name, x)
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    return state


def transpose(name, x):
    """The weight in the other format."""
    return x.T if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name) else x


def read_config(path):
    """What config.json holds, {} if there is none. It must describe a GPT-2."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    for name, values in GPT2.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(f"{name} is {config[name]!r}, in GPT-2 {values[0]!r}")
    return config
