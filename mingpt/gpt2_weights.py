"""GPT-2's weights in Hugging Face's format: load_gpt2 and save_gpt2.

The names of the weights are those of mingpt/model.py. Hugging Face keeps the matrices
of a block as (inputs, outputs), and nn.Linear as (outputs, inputs), so they are
transposed here. https://huggingface.co/docs/transformers/model_doc/gpt2
"""

import json
import os
import re

import safetensors.torch

from mingpt.model import GPT, GPTConfig

# What GPT-2 is, where config.json may say something else.
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def load_gpt2(path, **more):
    """A GPT with the weights of `path`, in float32, on the CPU.

    path: a .safetensors file, or a folder as save_pretrained() of transformers writes
    it. The size follows from the weights, and the number of heads from config.json
    beside them; without it, a head has 64 channels, as in every GPT-2. more: other
    fields of GPTConfig.
    """
    state = read(path)
    saved = read_config(path)
    vocab_size, n_embd = state["transformer.wte.weight"].shape
    config = GPTConfig(
        block_size=len(state["transformer.wpe.weight"]),
        vocab_size=vocab_size,
        n_layer=sum(name.endswith(".ln_1.weight") for name in state),
        n_head=saved.get("n_head", n_embd // 64),
        n_embd=n_embd,
        **more,
    )
    model = GPT(config)
    model.load_state_dict(state)
    return model


def save_gpt2(model, path):
    """Write `model`, a GPT of mingpt/model.py, into the folder `path`.

    transformers.GPT2LMHeadModel.from_pretrained(path) loads it, and load_gpt2(path).
    """
    if not isinstance(model, GPT):
        raise TypeError(f"{type(model)} is not the GPT of mingpt/model.py")
    state = {}
    for name, weight in model.state_dict().items():
        state[name] = transpose(name, weight).contiguous()
    del state["lm_head.weight"]  # the token embedding once more
    own = model.config
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **GPT2,
        "vocab_size": own.vocab_size,
        "n_positions": own.block_size,
        "n_embd": own.n_embd,
        "n_layer": own.n_layer,
        "n_head": own.n_head,
        "resid_pdrop": own.dropout,
        "embd_pdrop": own.dropout,
        "attn_pdrop": own.dropout,
    }
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    safetensors.torch.save_file(
        state, f"{path}/model.safetensors", metadata={"format": "pt"}
    )


def read(path):
    """The state_dict of a file, with the names and shapes of mingpt/model.py."""
    if os.path.isdir(path):
        path = f"{path}/model.safetensors"
    state = {}
    for name, weight in safetensors.torch.load_file(path).items():
        if not name.startswith(("transformer.", "lm_head.")):  # in old files
            name = f"transformer.{name}"
        if not name.endswith((".attn.bias", ".attn.masked_bias")):  # old files' masks
            state[name] = transpose(name, weight)
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    return state


def transpose(name, weight):
    """The weight in the other format."""
    in_a_block = re.search(r"(c_attn|c_proj|c_fc)\.weight$", name)
    return weight.T if in_a_block else weight


def read_config(path):
    """What config.json holds, {} if there is none. It must describe a GPT-2.

    path: its folder, or a file in the same folder.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    for name, value in GPT2.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {config[name]!r}, in GPT-2 {value!r}")
    return config
