"""What is shown on a terminal: times."""

from megazoo.terminal import clock


def test_times_are_rounded_to_seconds():
    times = {0.4: "0:00", 59.6: "1:00", 65: "1:05", 3599.7: "1:00:00", 7384: "2:03:04"}
    assert {seconds: clock(seconds) for seconds in times} == times
