"""mingpt/data.py and batches.py: no text is lost, and the order of the windows."""

import itertools
import json
import os
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mingpt import batches, data
from mingpt import tokenizer as tokenizers_of_ours

END = "<|endoftext|>"
# All that a cut could go wrong at: CRLF, a BOM, tabs, blank lines, 1 to 4 bytes.
TRICKY = (
    "\ufeffFirst line, it's 12345 one_two\r\n\r\n\tBär  \n\n 中文字。\n\u3000\u3000"
    "中文 字 x.\n/path\n    def f(x):\n        return 'a' \n🙂 \0 e\u0301\n"
)


def check_fails(capfd, words, function, *arguments):
    """The function ends with one line on stderr, which has the words, and status 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    line = capfd.readouterr().err
    assert ended.value.code == 2
    assert re.fullmatch(rf".*error: .*{words}.*\n", line), line


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return str(path)


def prepare(path, *options, **more):
    """`data.prepare` of one path."""
    return data.prepare([str(path)], *options, **more)


def whole(corpus):
    """The text of a corpus, decoded."""
    decode = corpus.tokenizer.decode
    return decode(corpus.train) + decode(corpus.val)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The path of a byte-level BPE as GPT-2's, which asks to be padded."""
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer files")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TRICKY * 9], vocab_size=400, special_tokens=[END], show_progress=False
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=500)
    path = str(tmp_path_factory.mktemp("bpe") / "tokenizer.json")
    tokenizer.save(path)
    return path


@pytest.fixture(params=["chars", "bytes", "bpe"])
def kind(request):
    if request.param == "bpe":
        return request.getfixturevalue("bpe")
    return request.param


def test_files_are_sorted_and_count_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "d/c.txt", "d/e/f.txt", "d/.hidden", "d/.git/g.txt", "a.md"):
        write(tmp_path / name, name)
    (tmp_path / "d/again.txt").symlink_to("../b.txt")
    for paths, expected in (
        (["b.txt"], "b.txt"),
        (["d", "b.txt", "a.md"], "a.md b.txt d/c.txt d/e/f.txt"),
        (["a.md", str(tmp_path / "b.txt"), "*.md"], "b.txt a.md"),
        (["**/*.txt"], "b.txt d/c.txt d/e/f.txt"),
    ):
        found = data.find_files(paths)
        names = {os.path.relpath(name) for name in found}
        assert names == set(expected.split()), paths
        assert len(found) == len(names)
        assert found == data.find_files(paths[::-1])


def test_bad_input_ends_in_one_line(tmp_path, capfd):
    text = write(tmp_path / "text.txt", "text\n" * 9)
    (tmp_path / "latin.txt").write_bytes(b"abc\nd\xe9 f")
    write(tmp_path / "none.json", '{"no": 1}')
    cache = tmp_path / "cache"
    for name, words in (
        ("none.txt", "there is no text in .*none.txt"),
        ("latin.txt", "cannot read .*latin.txt: .* byte 0xe9"),
    ):
        check_fails(capfd, words, prepare, tmp_path / name, "chars", cache)
        assert not cache.exists()
    for name in ("none.json", "no.json"):
        words = "not chars, bytes or a good file"
        check_fails(capfd, words, prepare, text, str(tmp_path / name), cache)
        assert not cache.exists()
    encode = tokenizers_of_ours.CharTokenizer("abc").encode
    check_fails(capfd, "has no 'é'", encode, "é")


def test_the_tokens_are_the_text_and_nothing_is_changed(kind, tmp_path, monkeypatch):
    """Also with a tokenizer that comes back from its state."""
    text = TRICKY * 20
    path = write(tmp_path / "text.txt", text)
    for piece in (1 << 20, 50):  # whatever is read at a time
        monkeypatch.setattr(data, "PIECE", piece)
        corpus = prepare(path, kind, tmp_path / f"cache{piece}")
        assert whole(corpus) == text
        assert isinstance(corpus.train, np.memmap)
        assert not corpus.train.flags.writeable
        assert corpus.train.dtype == corpus.val.dtype == np.uint16
        assert corpus.train.max() < corpus.vocab_size
        assert corpus.val.max() < corpus.vocab_size
        assert f"{len(text.encode()):,} bytes" in corpus.description
    tokenizer = corpus.tokenizer
    state = json.loads(json.dumps(tokenizer.state()))
    again = tokenizers_of_ours.make_tokenizer(state)
    assert again.vocab_size == tokenizer.vocab_size
    ids = again.encode(TRICKY)
    assert ids == tokenizer.encode(TRICKY)
    assert again.decode(ids) == TRICKY
    assert again.decode(torch.tensor(ids)) == TRICKY


def test_more_than_65536_tokens_need_32_bits(tmp_path):
    first = 0x10000  # below, some numbers are surrogates, which are no characters
    text = "".join(map(chr, range(first, first + 65537)))
    path = write(tmp_path / "text.txt", text)
    corpus = prepare(path, "chars", tmp_path / "cache")
    assert corpus.vocab_size == 65537
    assert corpus.train.dtype == np.uint32
    assert whole(corpus) == text
    source, targets = batches.Blocks(corpus.train, 9).__getitems__([7])
    assert source.dtype == targets.dtype == torch.int64
    assert corpus.tokenizer.decode(source[0]) == text[7:16]


def test_all_tokenizers_validate_on_the_same_text(bpe, tmp_path):
    for name in "abc":
        write(tmp_path / f"text/{name}.txt", f"{name}\n" + TRICKY * 5)
    found = set()
    for kind in ("chars", "bytes", bpe):
        corpus = prepare(tmp_path / "text", kind, tmp_path / "cache", 0.5)
        tokenizer = corpus.tokenizer
        text = tokenizer.decode(corpus.val).replace(END, "\n")
        found.add(text)
        first = tokenizer.decode(corpus.val[:1])
        assert corpus.val_bytes == len(text.encode()) - len(first.encode())
        ends = [*corpus.train, *corpus.val].count(tokenizer.separator)
        assert ends == (2 if kind == bpe else 0)
    assert len(found) == 1
    assert len(text.encode()) > 500


@pytest.mark.parametrize(
    ("texts", "train", "val"),
    [
        (["line\n" * 1000], 4505, 495),  # after the line of the cut
        (["ab\n" * 9 + "中" * 1000], 2727, 300),  # a long line: between characters
        (["x" * 900 + "\n", "y\n" * 50], 904, 98),  # two files
        (["x"] * 2, 2, 1),
    ],
)
def test_a_split_shares_nothing_and_cuts_no_character(texts, train, val, tmp_path):
    for number, text in enumerate(texts):
        write(tmp_path / f"text/{number}", text)
    corpus = prepare(tmp_path / "text", "bytes", tmp_path / "cache")
    assert (len(corpus.train), len(corpus.val)) == (train, val)
    assert whole(corpus) == "\n".join(texts)


@pytest.fixture
def counted(monkeypatch):
    """The folders of all texts that were encoded."""
    folders = []
    encode = data.encode

    def count(pieces, tokenizer, dtype, folder):
        folders.append(folder)
        encode(pieces, tokenizer, dtype, folder)

    monkeypatch.setattr(data, "encode", count)
    return folders


def test_encoded_once_and_only_for_this_text(counted, bpe, tmp_path):
    text = write(tmp_path / "text.txt", "ab\nc\n" * 99)
    cache = tmp_path / "cache"
    first = prepare(text, "chars", cache)
    again = prepare(text, "chars", cache)
    assert len(counted) == 1
    assert first.checksum == again.checksum
    assert first.val_bytes == again.val_bytes
    assert np.array_equal(first.val, again.val)
    # The same size and time, another content; another tokenizer; another split.
    status = os.stat(text)
    write(tmp_path / "text.txt", "cd\na\n" * 99)
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    # The same bytes, in two files: <|endoftext|> would be elsewhere.
    one = tmp_path / "one"
    write(one / "x", "ab\n")
    write(one / "y", "c\n")
    two = tmp_path / "two"
    write(two / "x", "a")
    write(two / "y", "b\nc\n")
    checksums = {
        first.checksum,
        prepare(text, "chars", cache).checksum,
        prepare(text, "bytes", cache).checksum,
        prepare(text, bpe, cache).checksum,
        prepare(text, "chars", cache, fraction=0.2).checksum,
        prepare(one, "chars", cache).checksum,
        prepare(two, "chars", cache).checksum,
    }
    assert len(checksums) == len(counted) == 7


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_predicts_each_token_once(world_size):
    block_size = 8
    batch_size = 3
    for n_tokens in (2, 17, 64, 65, 66, 100):
        tokens = np.arange(n_tokens, dtype=np.uint16)
        predicted = []
        for rank in range(world_size):
            starts = batches.eval_starts(
                n_tokens, block_size, batch_size, rank, world_size
            )
            blocks = batches.Blocks(tokens, block_size)
            loader = DataLoader(blocks, batch_size, sampler=starts, collate_fn=tuple)
            for source, targets in loader:
                assert source.shape == targets.shape == (batch_size, block_size)
                counts = targets >= 0
                assert torch.equal(targets[counts], source[counts] + 1)
                predicted += targets[counts].tolist()
        assert sorted(predicted) == list(range(1, n_tokens))
    # Rank 0 has 3 of the 5 blocks, so rank 1 needs a second batch, too.
    starts = batches.eval_starts(
        n_tokens=41, block_size=8, batch_size=2, replica=1, replicas=2
    )
    assert len(starts) == 4


@pytest.mark.parametrize("n_tokens", [9, 15, 16, 17, 24, 100, 1001])
def test_a_pass_takes_each_window_once(n_tokens):
    block_size = 8
    sampler = batches.StepSampler(n_tokens, block_size, batch_size=1, seed=3)
    stream = iter(sampler)
    shifts = set()
    orders = set()
    all_starts = set()
    for _ in range(100):
        starts = list(itertools.islice(stream, sampler.windows))
        first = min(starts)
        last = max(starts)
        assert sorted(starts) == list(range(first, last + 1, block_size))
        # A window has a target after its last token. All that fits is taken.
        assert first >= 0
        assert last + block_size <= n_tokens - 1
        assert n_tokens - len(starts) * block_size <= 2 * block_size
        shifts.add(first)
        orders.add(tuple(start - first for start in starts))
        all_starts.update(starts)
    # Each token is trained on, and predicted.
    assert min(all_starts) == 0
    assert max(all_starts) == n_tokens - 1 - block_size
    if n_tokens > 99:
        assert len(shifts) > 4
        assert len(orders) > 90


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_takes_the_same_windows_at_every_world_size(world_size):
    """Also in a run that resumes, with steps of another size. A pass has 61 windows."""
    n_tokens = 500
    block_size = 8
    seed = 5
    sampler = batches.StepSampler(n_tokens, block_size, batch_size=1, seed=seed)
    alone = list(itertools.islice(sampler, 2000))
    for batch_size, start in ((3, 0), (5, 12), (5, 60), (12, 13), (7, 777)):
        for rank in range(world_size):
            sampler = batches.StepSampler(
                n_tokens, block_size, batch_size, seed, rank, world_size
            )
            sampler.start = start
            found = list(itertools.islice(sampler, 100))
            assert found == alone[start + rank :: world_size][:100]
