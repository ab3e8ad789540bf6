"""Tokenizers: text to numbers and back. `state()` is what a snapshot keeps of them."""

import utils


class ByteTokenizer:
    """A token is a byte of the text in UTF-8."""

    vocab_size = 256
    separator = None  # the token between two files, if it is no newline

    def encode(self, text):
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, ids):
        return bytes(map(int, ids)).decode("utf-8", "replace")

    def state(self):
        return {"kind": "bytes"}


class CharTokenizer:
    """A token is a character. `chars` has each character of the vocabulary once."""

    separator = None

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.ids = {char: number for number, char in enumerate(chars)}

    def encode(self, text):
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            utils.error(f"the vocabulary has no {error}: it was made from another text")

    def decode(self, ids):
        return "".join(self.chars[i] for i in ids)

    def state(self):
        return {"kind": "chars", "chars": self.chars}


class FileTokenizer:
    """A tokenizer of the package `tokenizers`, from the content of its JSON file.

    It adds no special tokens, but it knows their names, such as <|endoftext|>.
    """

    def __init__(self, content):
        from tokenizers import Tokenizer  # a package that only this class needs

        self.tokenizer = Tokenizer.from_str(content)
        self.tokenizer.no_truncation()  # some files ask for the first 512 tokens only
        self.tokenizer.no_padding()
        # If numbers are missing, there are fewer tokens than the highest number says.
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self.separator = self.tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def state(self):
        return {"kind": "file", "json": self.tokenizer.to_str()}


def make_tokenizer(state):
    """The tokenizer whose `state()` this is."""
    if state["kind"] == "bytes":
        return ByteTokenizer()
    if state["kind"] == "chars":
        return CharTokenizer(state["chars"])
    return FileTokenizer(state["json"])


def read_tokenizer(path):
    """The tokenizer in a file; else one line and exit status 2."""
    try:
        with open(path, encoding="utf-8") as file:
            return FileTokenizer(file.read())
    except Exception as error:  # the package raises nothing more exact
        utils.error(f"--tokenizer {path} is not chars, bytes or a good file: {error}")
