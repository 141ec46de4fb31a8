"""Test that work is halved until its parts fit into memory."""

from collections.abc import Sequence

import pytest

from gradcam.hooks.memory import HalvingRunner


def test_parts_are_halved_until_they_fit() -> None:
    attempts: list[list[int]] = []

    def work(part: Sequence[int]) -> int:
        attempts.append(list(part))
        if len(part) > 2:
            raise MemoryError
        return sum(part)

    # Seven items do not fit, nor do three, which is half of seven.
    assert list(HalvingRunner(8).run(work, range(7))) == [0, 1, 2, 3, 4, 5, 6]
    assert [len(attempt) for attempt in attempts] == [7, 3, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("error", "items"), [(MemoryError(), [1]), (ValueError("no memory error"), [1, 2])])
def test_other_errors_are_raised(error: Exception, items: list[int]) -> None:
    def work(part: Sequence[int]) -> None:
        raise error

    with pytest.raises(type(error)):
        list(HalvingRunner(8).run(work, items))
