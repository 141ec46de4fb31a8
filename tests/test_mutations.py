"""Test a few damaged files of each kind; GRADCAM_MUTATIONS=500 in the environment tests 500 of each."""

import os
import sys

import pytest

from tests.mutations import KINDS, examine

COUNT = int(os.environ.get("GRADCAM_MUTATIONS", "80"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by what Linux says of a process")
@pytest.mark.parametrize("name", KINDS)
def test_a_changed_file_is_read_or_refused_in_a_line_or_two(name: str) -> None:
    outcomes = list(examine(name, seed=0, cases=range(COUNT)))
    assert len(outcomes) == COUNT
    assert [outcome for outcome in outcomes if not outcome.is_good] == []
    assert {outcome.result for outcome in outcomes} == {"read", "refused"}
