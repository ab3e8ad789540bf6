"""Code that readers copy from the pages, and that no command of a page runs."""

from tests.helpers.checks import fence


def test_the_example_of_a_test(tmp_path):
    names = {}
    exec(fence("CONTRIBUTING.md", "note_mean"), names)
    names["test_the_statistics_of_rank_0_are_saved"](tmp_path)
