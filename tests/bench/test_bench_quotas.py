"""What the benchmark of quotas puts down to the server that it runs against."""

from __future__ import annotations

from bench.quotas import figures, refusals


def test_a_stall_of_the_server_excuses_as_many_refusals_as_could_pile_up_and_no_more() -> None:
    # Given a server that stood still from 1.96 to 2.0 s, at 50 requests a second, and four refusals after that and one before
    arrivals, let_in = [0.0, 1.5, 2.1, 2.2, 2.3, 2.9, 3.5], [True, False, False, False, False, True, False]
    counts = {"arrivals": arrivals, "let_in": let_in, "most_running": 1, "stalls": [[2.0, 0.04]]}
    # When what is left is asked for; then two are excused, and none that came before or a second later
    assert refusals(counts, 50) == [1.5, 2.3, 3.5]
    found = figures(counts, [200, 429], 50)
    assert (found.refused, found.refused_later, found.stalled, found.unanswered) == (5, 5, 2, 1)
