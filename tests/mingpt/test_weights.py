"""mingpt/gpt2_weights.py: the same logits as transformers' GPT-2, both ways."""

import json
from dataclasses import replace

import pytest
import torch

from mingpt import loading, options
from mingpt.model import GPT, GPTConfig
from tests.helpers.gpt_checks import awake, tokens

reason = "mingpt/gpt2_weights.py needs it"
safetensors = pytest.importorskip("safetensors", reason=reason)
from mingpt.gpt2_weights import load_gpt2, save_gpt2  # noqa: E402


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="its GPT-2 is the judge")


@pytest.fixture(scope="module")
def theirs(transformers):
    """A small GPT-2 of transformers, with large random weights and biases."""
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=128,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return awake(transformers.GPT2LMHeadModel(config)).eval()


@pytest.fixture
def folder(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    return tmp_path


def check_same(ours, theirs):
    """The logits agree in float64, in which rounding hides nothing."""
    idx = tokens(ours)
    with torch.no_grad():
        expected = theirs.double()(idx).logits
        found, _ = ours.double()(idx)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    ours.float()
    theirs.float()


def test_loads_what_transformers_saves(folder, theirs):
    model = load_gpt2(folder)
    expected = GPTConfig(block_size=16, vocab_size=31, n_layer=2, n_head=2, n_embd=128)
    assert model.config == expected
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    check_same(model.eval(), theirs)


def test_transformers_loads_what_save_gpt2_saves(transformers, tmp_path):
    config = GPTConfig(
        block_size=16, vocab_size=31, n_layer=2, n_head=4, n_embd=64, dropout=0.3
    )
    model = awake(GPT(config)).eval()
    save_gpt2(model, tmp_path / "new")
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "new", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check_same(model, theirs.eval())
    written = theirs.config
    assert written.attn_pdrop == written.resid_pdrop == written.embd_pdrop == 0.3
    file = tmp_path / "new/model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:  # old versions ask for it
        assert opened.metadata() == {"format": "pt"}
    # Nothing in the weights tells the number of heads: the config beside them does.
    again = load_gpt2(file, dropout=0.2, checkpoint=True)
    assert again.config == replace(config, dropout=0.2, checkpoint=True)
    state = again.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name])


@pytest.mark.parametrize("whole_folder", [True, False])
def test_loads_old_files(theirs, tmp_path, whole_folder):
    """Those of 2019 have short names, and masks among the weights."""
    state = {}
    for name, weight in theirs.transformer.state_dict().items():
        state[name] = weight.contiguous()
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, file)
    path = tmp_path if whole_folder else file
    model = load_gpt2(str(path))
    check_same(model.eval(), theirs)


def test_refuses_what_is_no_gpt2(folder):
    path = folder / "config.json"
    before = path.read_text()
    config = json.loads(before)
    for name, value, words in (
        ("activation_function", "relu", "is 'relu', in GPT-2 'gelu_new'"),
        ("model_type", "llama", "model_type is 'llama', in GPT-2 'gpt2'"),
    ):
        path.write_text(json.dumps(config | {name: value}))
        with pytest.raises(ValueError, match=words):
            load_gpt2(folder)
    path.write_text(before)
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    del state["transformer.ln_f.bias"]
    safetensors.torch.save_file(state, path)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_gpt2(folder)
    path.write_bytes(b"not weights at all")
    with pytest.raises(safetensors.SafetensorError):
        load_gpt2(folder)


@pytest.mark.parametrize(
    ("words", "vocab_size", "line"),
    [([], 30, "has vocab_size 31, not 30"), (["--n-layer=3"], 31, "n_layer 2, not 3")],
)
def test_another_size_ends_in_one_line(folder, capsys, words, vocab_size, line):
    """With another vocabulary, the tokens of a text would be other words."""
    words = ["--init-from", str(folder), "--device=cpu", *words]
    configuration = options.resolve(options.make_parser("").parse_args(words))
    with pytest.raises(SystemExit) as ended:
        loading.load_model(configuration, vocab_size)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err
