"""Run mingpt.train, which gets SIGTERM in step 13. For new interpreters.

python tests/hooks/gpt.py --steps 20
"""

import signal

from mingpt import options, train
from tests.hooks.faults import in_step


def get_sigterm(_):
    signal.raise_signal(signal.SIGTERM)


train.Trainer.ask_every = 1
in_step(vars(train), 13, get_sigterm)
train.main(options.resolve(options.make_parser(train.__doc__).parse_args()))
