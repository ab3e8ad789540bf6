"""A run that several tests look at, and that is made when the first of them asks."""

import functools
import inspect

import pytest


def made_once(run):
    """Make `run` a fixture of its name.

    That is a function that calls `run` once for each set of arguments, in a new folder,
    and keeps the result.
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
