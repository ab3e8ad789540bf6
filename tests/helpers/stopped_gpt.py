"""mingpt.train, which gets SIGTERM in step 13."""

import signal

from mingpt import options, train
from tests.hooks.faults import in_step

train.Trainer.ask_every = 1
in_step(vars(train), 13, lambda _: signal.raise_signal(signal.SIGTERM))
train.main(options.resolve(options.make_parser(train.__doc__).parse_args()))
