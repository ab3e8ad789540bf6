"""mingpt/gpt2_weights.py: the same logits as transformers' GPT-2, both ways."""

import json

import pytest
import torch

from mingpt.model import GPT, GPTConfig
from tests.gpt_checks import awake, build, tokens

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
    """The logits agree in float32 and, with the same weights, in float64."""
    idx = tokens(ours)
    with torch.no_grad():
        for dtype, error in ((torch.float32, 1e-4), (torch.float64, 1e-11)):
            ours.to(dtype), theirs.to(dtype)
            expected = theirs(idx).logits
            assert expected.std() > 0.5
            torch.testing.assert_close(ours(idx)[0], expected, rtol=0, atol=error)
            ours.float(), theirs.float()


def test_loads_what_transformers_saves(folder, theirs):
    model = load_gpt2(folder)
    assert model.config == GPTConfig(16, 31, 2, 2, 128)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    check_same(model.eval(), theirs)


def test_transformers_loads_what_save_gpt2_saves(transformers, tmp_path):
    model = awake(GPT(GPTConfig(16, 31, 2, 4, 64, dropout=0.3))).eval()
    save_gpt2(model, tmp_path / "new")
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "new", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check_same(model, theirs.eval())
    c = theirs.config
    assert (c.attn_pdrop, c.resid_pdrop, c.embd_pdrop) == (0.3, 0.3, 0.3)
    assert (c.bos_token_id, c.eos_token_id) == (None, None)
    again = load_gpt2(tmp_path / "new", dropout=0.2, checkpoint=True)
    assert again.config == GPTConfig(16, 31, 2, 4, 64, dropout=0.2, checkpoint=True)
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name])


def test_old_versions_of_transformers_find_what_they_ask_for(tmp_path):
    """They refuse a file whose metadata do not name PyTorch."""
    save_gpt2(GPT(GPTConfig(4, 50257, 1, 1, 2)), tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (50256, 50256)


def old(theirs):
    """The weights as the files of 2019 have them: short names, masks among them."""
    state = {n.removeprefix("transformer."): x for n, x in theirs.state_dict().items()}
    for i in range(2):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return {name: x.contiguous() for name, x in state.items()}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("whole_folder", [True, False])
def test_loads_old_files(theirs, tmp_path, file, head, whole_folder):
    state = old(theirs)
    if head:
        state["lm_head.weight"] = state["lm_head.weight"].clone()
    else:
        del state["lm_head.weight"]
    save = safetensors.torch.save_file if file.endswith("s") else torch.save
    save(state, tmp_path / file)
    model = load_gpt2(str(tmp_path if whole_folder else tmp_path / file))
    check_same(model.eval(), theirs)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_loads_a_model_in_several_files(theirs, tmp_path, kind):
    state = theirs.transformer.state_dict()
    names = sorted(state)
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:])):
        file = kind.replace(".", f"-{i + 1:05}-of-00002.")
        save = safetensors.torch.save_file if kind.endswith("s") else torch.save
        save({name: state[name].contiguous() for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / f"{kind}.index.json").write_text(json.dumps(index))
    check_same(load_gpt2(tmp_path).eval(), theirs)
    (tmp_path / file).unlink()
    with pytest.raises(SystemExit):
        load_gpt2(tmp_path)


def test_the_number_of_heads_is_that_of_the_config(folder, theirs):
    """A head of GPT-2 has 64 channels. Nothing in the weights tells."""
    model = load_gpt2(folder / "model.safetensors")
    assert model.config.n_head == 2
    change(folder, n_head=4)
    model = load_gpt2(folder / "model.safetensors")
    assert model.config.n_head == 4
    with pytest.raises(AssertionError, match="not close"):
        check_same(model.eval(), theirs)


# Bad input


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def spoil(folder, **tensors):
    """Change tensors of the folder's file; None removes one."""
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path) | tensors
    state = {name: x for name, x in state.items() if x is not None}
    safetensors.torch.save_file(state, path)


def refused(path, capsys):
    """What load_gpt2 says, in one line, before the program ends with status 2."""
    with pytest.raises(SystemExit) as caught:
        load_gpt2(path)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "values, said",
    [
        ({"activation_function": "relu"}, "is 'relu', in GPT-2 'gelu_new'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, in GPT-2 1e-05"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"model_type": "llama"}, "model_type is 'llama', in GPT-2 'gpt2'"),
        ({"n_layer": 3}, "n_layer is 2, but 3 in config.json"),
        ({"vocab_size": 50257}, "vocab_size is 31, but 50257 in config.json"),
        ({"n_positions": 8}, "n_positions is 16, but 8 in config.json"),
        ({"n_embd": 64}, "n_embd is 128, but 64 in config.json"),
        ({"n_head": 3}, "128 channels make no 3 equal heads"),
    ],
)
def test_refuses_what_is_no_gpt2_by_its_config(folder, capsys, values, said):
    change(folder, **values)
    assert said in refused(folder, capsys)


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"transformer.ln_f.bias": None}, "has no transformer.ln_f.bias"),
        ({"transformer.wpe.weight": None}, "no token embedding and position embedding"),
        ({"transformer.wpe.weight": torch.ones(3)}, "no token embedding and position"),
        ({"transformer.h.0.extra": torch.ones(3)}, "extra, which no GPT-2 has"),
        (
            {"transformer.h.1.mlp.c_fc.weight": torch.ones(512, 128)},
            "c_fc.weight has the shape (128, 512), not (512, 128)",
        ),
        (
            {"lm_head.weight": torch.ones(31, 128)},
            "the head is not the token embedding",
        ),
    ],
)
def test_refuses_what_is_no_gpt2_by_its_weights(folder, capsys, tensors, said):
    spoil(folder, **tensors)
    assert said in refused(folder, capsys)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_refuses_a_damaged_file(tmp_path, capsys, file):
    for content in (b"", b"not weights at all", b"PK\x03\x04 half"):
        (tmp_path / file).write_bytes(content)
        assert "holds no weights, or is damaged" in refused(tmp_path, capsys)


@pytest.mark.parametrize("content", [[1, 2], [torch.ones(3)], {}])
def test_refuses_a_file_of_something_else(tmp_path, capsys, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    said = refused(tmp_path, capsys)
    assert ("no token embedding" if content == {} else "holds no weights") in said


def test_refuses_to_guess_the_heads_of_a_narrow_model(tmp_path, capsys):
    save_gpt2(GPT(GPTConfig(16, 31, 1, 2, 32)), tmp_path)
    (tmp_path / "config.json").unlink()
    assert "32 channels make no 0 equal heads" in refused(tmp_path, capsys)


def test_refuses_files_that_are_missing_or_no_json(tmp_path, folder, capsys):
    (tmp_path / "empty").mkdir()
    assert "has no GPT-2: none of model.s" in refused(tmp_path / "empty", capsys)
    line = refused(tmp_path / "none.safetensors", capsys)
    assert "none.safetensors cannot be read: No such file" in line
    for content in (b"{", b"[1]", b"\xff"):
        (folder / "config.json").write_bytes(content)
        assert "config.json is no JSON of this format" in refused(folder, capsys)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    assert "no token embedding and position embedding" in refused(tmp_path, capsys)


def test_runs_no_code_of_a_file(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"wte.weight": Evil()}, tmp_path / "pytorch_model.bin")
    assert "holds no weights" in refused(tmp_path, capsys)
    assert capsys.readouterr().out == ""


def test_saves_no_other_model(tmp_path):
    from mingpt import modern

    with pytest.raises(TypeError, match="is not the GPT of mingpt/model.py"):
        save_gpt2(build(modern), tmp_path)
    assert not list(tmp_path.iterdir())
