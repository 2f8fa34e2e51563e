"""Steps that nobody was asked about count, and those of another batch do not."""

from edgespec.tuning.step import MOST_IDLE_STEPS, steps_since


def test_steps_that_went_by_count_and_those_of_another_batch_do_not() -> None:
    longest = 4 + MOST_IDLE_STEPS + 1  # after a step that was tuned, as many as may follow it without being tuned
    assert [steps_since(4, number) for number in (5, 9, longest, 1 << 40)] == [1, 5, longest - 4, 1]
    assert steps_since(None, 9) == 1
