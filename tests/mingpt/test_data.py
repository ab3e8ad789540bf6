"""mingpt/data.py and batches.py: no text is lost, and the order of the windows."""

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
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def whole(corpus):
    """The text of a corpus, decoded."""
    return corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.val)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The path of a byte-level BPE as GPT-2's, which asks to be padded."""
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer files")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    how = {"vocab_size": 400, "special_tokens": [END], "show_progress": False}
    tokenizer.train_from_iterator([TRICKY * 9], **how)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=500)
    path = str(tmp_path_factory.mktemp("bpe") / "tokenizer.json")
    tokenizer.save(path)
    return path


@pytest.fixture(params=["chars", "bytes", "bpe"])
def kind(request):
    return request.getfixturevalue("bpe") if request.param == "bpe" else request.param


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
        found = [os.path.relpath(x) for x in data.find_files(paths)]
        assert sorted(found) == sorted(expected.split()), paths
        assert data.find_files(paths) == data.find_files(paths[::-1])


def test_bad_input_ends_in_one_line(tmp_path, capfd):
    text, cache = write(tmp_path / "text.txt", "text\n" * 9), tmp_path / "cache"
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "latin.txt", b"abc\nd\xe9 f")
    write(tmp_path / "none.json", '{"no": 1}')
    for arguments, words in (
        ((tmp_path / "none.txt", "chars"), "there is no text in .*none.txt"),
        ((tmp_path / "empty.txt", "chars"), "there is no text in .*empty.txt"),
        ((tmp_path / "latin.txt", "chars"), "cannot read .*latin.txt: .* byte 0xe9"),
        ((text, str(tmp_path / "none.json")), "not chars, bytes or a good file"),
        ((text, str(tmp_path / "no.json")), "not chars, bytes or a good file"),
    ):
        check_fails(capfd, words, data.prepare, *arguments, cache)
        assert not cache.exists()
    check_fails(capfd, "--val-fraction is 1", data.prepare, text, "chars", cache, 1)
    check_fails(capfd, "cannot keep the tokens", data.prepare, text, "chars", text)
    encode = tokenizers_of_ours.CharTokenizer("abc").encode
    check_fails(capfd, "has no 'é'", encode, "é")


def test_the_tokens_are_the_text_and_nothing_is_changed(kind, tmp_path, monkeypatch):
    """Also with a tokenizer that comes back from its state."""
    path = write(tmp_path / "text.txt", TRICKY * 20)
    for piece in (1 << 20, 50):  # whatever is read at a time
        monkeypatch.setattr(data, "PIECE", piece)
        corpus = data.prepare(path, kind, tmp_path / f"cache{piece}")
        assert whole(corpus) == TRICKY * 20
        assert isinstance(corpus.train, np.memmap) and not corpus.train.flags.writeable
        assert corpus.train.dtype == corpus.val.dtype == np.uint16
        assert max(corpus.train.max(), corpus.val.max()) < corpus.vocab_size
        assert f"{len((TRICKY * 20).encode()):,} bytes" in corpus.description
    tokenizer = corpus.tokenizer
    again = tokenizers_of_ours.make_tokenizer(json.loads(json.dumps(tokenizer.state())))
    assert again.vocab_size == tokenizer.vocab_size
    assert (ids := again.encode(TRICKY)) == tokenizer.encode(TRICKY)
    assert again.decode(ids) == again.decode(torch.tensor(ids)) == TRICKY


def test_more_than_65536_tokens_need_32_bits(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 65537)))
    path = write(tmp_path / "text.txt", text)
    corpus = data.prepare(path, "chars", tmp_path / "cache")
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
        corpus = data.prepare(tmp_path / "text", kind, tmp_path / "cache", 0.5)
        tokenizer = corpus.tokenizer
        text = tokenizer.decode(corpus.val).replace(END, "\n")
        first = tokenizer.decode(corpus.val[:1])
        found.add((text, corpus.val_bytes + len(first.encode())))
        ends = [*corpus.train, *corpus.val].count(tokenizer.separator)
        assert ends == (2 if kind == bpe else 0)
    ((text, size),) = found
    assert size == len(text.encode()) > 500


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
    corpus = data.prepare(tmp_path / "text", "bytes", tmp_path / "cache")
    assert (len(corpus.train), len(corpus.val)) == (train, val)
    assert whole(corpus) == "\n".join(texts)


@pytest.fixture
def counted(monkeypatch):
    """The places that were encoded."""
    places, encode = [], data.encode

    def count(*arguments):
        places.append(arguments[-1])
        encode(*arguments)

    monkeypatch.setattr(data, "encode", count)
    return places


def test_encoded_once_and_only_for_this_text(counted, bpe, tmp_path):
    text, cache = write(tmp_path / "text.txt", "ab\nc\n" * 99), tmp_path / "cache"
    first, again = (data.prepare(text, "chars", cache) for _ in range(2))
    assert len(counted) == 1 and first.checksum == again.checksum
    assert first.val_bytes == again.val_bytes and np.array_equal(first.val, again.val)
    # The same size and time, another content; another tokenizer; another split.
    status = os.stat(text)
    write(tmp_path / "text.txt", "cd\na\n" * 99)
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    checksums = {first.checksum}
    for arguments in ((), ("bytes",), (bpe,), ("chars", 0.2)):
        kind, *more = arguments or ("chars",)
        checksums.add(data.prepare(text, kind, cache, *more).checksum)
    # The same bytes, in two files: <|endoftext|> would be elsewhere.
    for folder, parts in (("one", ("ab\n", "c\n")), ("two", ("a", "b\nc\n"))):
        for name, content in zip("xy", parts, strict=True):
            write(tmp_path / folder / name, content)
        checksums.add(data.prepare(tmp_path / folder, "chars", cache).checksum)
    assert len(checksums) == len(counted) == 7


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_predicts_each_token_once(world_size):
    for n_tokens in (2, 17, 64, 65, 66, 100):
        tokens, block_size = np.arange(n_tokens, dtype=np.uint16), 8
        predicted = []
        for rank in range(world_size):
            loader = DataLoader(
                batches.Blocks(tokens, block_size),
                batch_size=3,
                sampler=batches.eval_starts(n_tokens, block_size, 3, rank, world_size),
                collate_fn=tuple,
            )
            for source, targets in loader:
                assert source.shape == targets.shape == (3, block_size)
                assert torch.equal(targets[targets >= 0], source[targets >= 0] + 1)
                predicted += targets[targets >= 0].tolist()
        assert sorted(predicted) == list(range(1, n_tokens))
    assert len(batches.eval_starts(41, 8, 2, 1, 2)) == 4  # as rank 0 has


@pytest.mark.parametrize("n_tokens", [9, 15, 16, 17, 24, 100, 1001])
def test_a_pass_takes_each_window_once(n_tokens):
    block_size = 8
    sampler = batches.StepSampler(n_tokens, block_size, 1, seed=3)
    shifts, orders, all_starts = set(), set(), set()
    for number in range(100):
        steps = range(number * sampler.windows, (number + 1) * sampler.windows)
        starts = [start for step in steps for start in sampler.starts(step)]
        shift = min(starts)
        assert sorted(starts) == [shift + block_size * i for i in range(len(starts))]
        # A window has a target after its last token. All that fits is taken.
        assert shift >= 0 and max(starts) + block_size <= n_tokens - 1
        assert n_tokens - len(starts) * block_size <= 2 * block_size
        shifts.add(shift)
        orders.add(tuple(start - shift for start in starts))
        all_starts.update(starts)
    # Each token is trained on, and predicted.
    assert min(all_starts) == 0 and max(all_starts) == n_tokens - 1 - block_size
    if n_tokens > 99:
        assert len(shifts) > 4 and len(orders) > 90


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_takes_the_same_windows_at_every_world_size(world_size):
    """Also in a run that resumes, with steps of another size. 61 windows: a pass."""
    alone = batches.StepSampler(500, 8, 1, seed=5)
    alone = [alone.starts(step)[0] for step in range(2000)]
    for batch_size, start in ((3, 0), (5, 12), (5, 60), (12, 13), (7, 777)):
        for rank in range(world_size):
            sampler = batches.StepSampler(500, 8, batch_size, 5, rank, world_size)
            sampler.start = start
            stream = iter(sampler)
            found = [next(stream) for _ in range(100)]
            assert found == alone[start + rank :: world_size][:100]
