import random

from drivetrain_buffer._ranges import RangeSet


def test_it_holds_what_a_set_holds() -> None:
    numbers = list(range(-20, 60))
    random.Random(0).shuffle(numbers)
    ranges, reference = RangeSet(), set[int]()
    for number in numbers:
        ranges.add(number)
        reference.add(number)
        ranges.add(number)
        assert [n in ranges for n in range(-25, 65)] == [n in reference for n in range(-25, 65)]
        gaps = sum(1 for n in reference if n + 1 not in reference)
        assert ranges.num_ranges == gaps
    assert ranges.num_ranges == 1
