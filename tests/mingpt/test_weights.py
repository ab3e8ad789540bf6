"""mingpt/gpt2_weights.py: the same logits as transformers' GPT-2, both ways."""

from dataclasses import replace

import pytest
import torch

from mingpt import loading, options
from mingpt.model import GPT, GPTConfig
from mingpt.tokenizer import read_tokenizer
from tests.helpers.gpt_checks import tokens, with_large_weights
from tests.helpers.gpt_runs import gpt, sample, snapshot
from tools.files import edit

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
    return with_large_weights(transformers.GPT2LMHeadModel(config)).eval()


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
    check_same(model.eval(), theirs)


def test_transformers_loads_what_save_gpt2_saves(transformers, tmp_path):
    config = GPTConfig(
        block_size=16, vocab_size=31, n_layer=2, n_head=4, n_embd=64, dropout=0.3
    )
    model = with_large_weights(GPT(config)).eval()
    save_gpt2(model, tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    check_same(model, theirs.eval())
    written = theirs.config
    assert written.attn_pdrop == written.resid_pdrop == written.embd_pdrop == 0.3
    file = tmp_path / "model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:  # old versions ask for it
        assert opened.metadata() == {"format": "pt"}
    # Nothing in the weights tells the number of heads: the config beside them does.
    again = load_gpt2(file, dropout=0.2, checkpoint=True)
    assert again.config == replace(config, dropout=0.2, checkpoint=True)


def test_loads_old_files(theirs, tmp_path):
    """Those of 2019 have short names, and masks among the weights."""
    state = theirs.transformer.state_dict()
    state = {name: weight.contiguous() for name, weight in state.items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    check_same(load_gpt2(tmp_path).eval(), theirs)


def test_refuses_what_is_no_gpt2(folder):
    edit(folder / "config.json", ("gelu_new", "relu"))
    with pytest.raises(ValueError, match="is 'relu', in GPT-2 'gelu_new'"):
        load_gpt2(folder)


def test_another_size_ends_in_one_line(folder, capsys):
    """With another vocabulary, the tokens of a text would be other words."""
    words = ["--init-from", str(folder), "--device=cpu"]
    configuration = options.resolve(options.make_parser("").parse_args(words))
    with pytest.raises(SystemExit):
        loading.load_model(configuration, vocab_size=30)
    assert "has vocab_size 31, not 30\n" in capsys.readouterr().err


@pytest.mark.waits
def test_gpt2_writes_and_fine_tuning_starts_from_its_weights(bpe, tmp_path):
    """A small one, with a tokenizer of its own."""
    size = read_tokenizer(bpe).vocab_size
    model = GPT(GPTConfig(16, vocab_size=size, n_layer=2, n_head=2, n_embd=32))
    folder = tmp_path / "gpt2"
    save_gpt2(model, folder)
    start = f"--init-from {folder} --tokenizer {bpe}"

    done = sample(tmp_path, f"--tokens 5 --prompt class {start}")
    assert done.stdout.startswith("class")

    gpt(tmp_path, f"{start} --steps 1 --lr 1e-12")
    found = snapshot(tmp_path)["MODEL_STATE"]
    expected = model.state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
