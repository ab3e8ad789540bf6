"""A run that several tests look at, and that is made when the first of them asks."""

import functools
import inspect

import pytest


def made_once(run):
    """The fixture of this name: a function that returns what `run(folder, ...)` does.

    Called again with the same arguments, it returns the same. folder: a new one for
    each run.
    """
    signature = inspect.signature(run)

    @pytest.fixture(scope="session")
    def fixture(tmp_path_factory):
        @functools.cache
        def kept(*arguments):
            return run(tmp_path_factory.mktemp(run.__name__), *arguments)

        def get(*arguments, **options):
            bound = signature.bind(None, *arguments, **options)
            bound.apply_defaults()
            _, *arguments = bound.args
            return kept(*arguments)

        return get

    return fixture
