"""A text to train on, made of a few words.

Each word is followed by one of three, by chance. Every Python writes the same text,
because the random numbers are made here.
"""

WORDS = """a batch device epoch gradient held-out loss model of on one optimizer over
process rank sample saves seed several snapshot step takes that the trains two update
waits weight which with"""


def sentences(count):
    """`count` lines, of 4 to 11 words each: about 45 characters."""
    kinds = WORDS.split()
    number = 1

    def draw(below):
        nonlocal number
        number = number * 16807 % (2**31 - 1)  # Lehmer's generator, in whole numbers
        return number // 1024 % below

    written = []
    for _ in range(count):
        word = draw(len(kinds))
        words = [kinds[word].capitalize()]
        for _ in range(3 + draw(8)):
            word = (7 * word + 5 * draw(3) + 1) % len(kinds)
            words.append(kinds[word])
        written.append(" ".join(words) + ".\n")
    return "".join(written)
