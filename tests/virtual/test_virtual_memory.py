"""What becomes of allowances that come late, twice or out of order: the last one that the scheduler has sent counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hypothesis import given
from hypothesis import strategies as st

from tangram.wire import HEADROOM_MB
from tests.virtual.memory import VirtualControls, VirtualWatcher
from workers.cpu.memory.allowance import IDLE_S, LATEST_S, SOONEST_S, Allowance
from workers.cpu.memory.controls import Use
from workers.memory import MIB

LIMIT_MB, HELD_MB = 500, 30


def environment(controls: VirtualControls | None = None, watcher: VirtualWatcher | None = None) -> Allowance:
    """Return the memory of an environment that holds `HELD_MB`."""
    controls = controls or VirtualControls(LIMIT_MB)
    controls.wanted_mb = HELD_MB
    return Allowance("e", LIMIT_MB, controls, watcher or VirtualWatcher())  # type: ignore[arg-type]


def test_one_that_comes_when_nothing_runs_allows_nothing_and_makes_earlier_ones_void() -> None:
    allowance = environment()
    with allowance.action(100, (1, 1)):
        pass
    allowance.allow(300, (1, 5))
    assert allowance.now() == (HELD_MB + HEADROOM_MB, 1, 5)
    with allowance.action(120, (1, 4)):
        assert allowance.allowed_mb == HELD_MB + HEADROOM_MB


def test_what_a_replaced_scheduler_has_sent_is_void() -> None:
    allowance = environment()
    with allowance.action(160, (2, 1)):
        allowance.allow(400, (1, 900))
        assert allowance.allowed_mb == 160


class CountingControls(VirtualControls):
    """Counts what takes long: measurements, and bounds that are written."""

    measured = written = 0

    def _cache(self) -> int:
        self.measured += 1
        return super()._cache()

    def bound(self, most_bytes: int) -> None:
        self.written += 1
        super().bound(most_bytes)


def test_actions_that_leave_their_environment_as_it_was_measure_and_write_nothing() -> None:
    # Given an environment that has been measured after an action
    controls = CountingControls(LIMIT_MB)
    allowance = environment(controls)
    with allowance.action(100, (1, 1)):
        pass
    before = controls.measured, controls.written
    # When further ones are granted what it may use, or nothing, and use no more; then what they held is known all the same
    for serial, grant_mb in enumerate((HELD_MB + HEADROOM_MB, 0, HELD_MB + HEADROOM_MB), start=2):
        with allowance.action(grant_mb, (1, serial)) as memory:
            pass
        assert (memory.memory_mb, memory.resident_mb) == (HELD_MB, HELD_MB)
        assert memory.allowed == (1, serial if grant_mb else serial - 1), "the end says which allowance came last"
    assert (controls.measured, controls.written) == before
    # And one that leaves something behind is measured
    with allowance.action(0, (1, 9)) as memory:
        controls.wanted_mb += 5
    assert memory.resident_mb == HELD_MB + 5 and controls.measured > before[0]


class RecordingWatcher(VirtualWatcher):
    """Keeps after how many seconds an environment was to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.patience_s: list[float] = []

    def look_within(self, allowance: Allowance, patience_s: float) -> None:
        self.patience_s.append(patience_s)


def test_while_no_action_runs_and_nothing_grows_looks_are_rare_and_an_action_brings_the_next_one_forward() -> None:
    # Given an environment that is held to what an action has left
    controls, watcher = VirtualControls(LIMIT_MB), RecordingWatcher()
    allowance = environment(controls, watcher)
    with allowance.action(100, (1, 1)):
        pass
    # When nothing happens; then each look comes twice as late as the one before
    assert [allowance.look() for _ in range(5)] == [0.08, 0.16, IDLE_S, IDLE_S, IDLE_S]
    # And when something that was left running grows, the next one comes soon again
    controls.wanted_mb += 2
    assert [allowance.look() for _ in range(2)] == [LATEST_S, 0.08]
    # And when an action begins that is granted nothing more, it is looked at in time
    with allowance.action(0, (1, 2)):
        assert SOONEST_S <= watcher.patience_s[-1] <= LATEST_S
        assert SOONEST_S <= allowance.look() <= LATEST_S


class CachingControls(VirtualControls):
    """Has pages of files, too: as many as there is room for beside what programs hold."""

    files_mb, met = 0, 0

    def used(self) -> int:
        wanted = (self.wanted_mb + self.files_mb) * MIB
        self.met += wanted > self._most_bytes
        return min(wanted, self._most_bytes)

    def _cache(self) -> int:
        return self.used() - min(self.wanted_mb * MIB, self._most_bytes)

    def meets(self) -> bytes:
        return str(self.met).encode()


def test_files_that_were_read_stay_in_memory_and_what_takes_their_place_counts() -> None:
    controls = CachingControls(LIMIT_MB)
    controls.files_mb = 300
    allowance = environment(controls)
    with allowance.action(60, (1, 1)):
        # Given an environment with more pages of files than it may hold memory; then they stay, also when the allowance is lowered
        for _ in range(5):
            allowance.look()
        assert controls.use() == Use(HELD_MB * MIB, 300 * MIB) and not allowance.is_paused
    assert controls.use().cache == 300 * MIB
    with allowance.action(60, (1, 2)):
        # When the files are gone, and programs take a part of the room; then it is paused all the same
        controls.files_mb, controls.wanted_mb = 0, 80
        allowance.look()
        assert allowance.is_paused


def test_a_paused_environment_that_was_awake_is_short_of_memory_until_a_look_finds_room() -> None:
    # Given an environment that is paused
    controls = VirtualControls(LIMIT_MB)
    allowance = environment(controls, RecordingWatcher())
    with allowance.action(60, (1, 1)):
        controls.wanted_mb = 80
        allowance.look()
        # When something in it is ended while something else starts; then there is no room meanwhile, whenever it is looked at
        with allowance.awake():
            with allowance.awake():
                assert allowance.is_short and not allowance.is_paused
            allowance.look()
            assert allowance.is_short and not allowance.is_paused
        # Nor is there room before a look shows it
        assert allowance.is_short
        allowance.look()
        assert allowance.is_paused
        with allowance.awake():
            controls.wanted_mb = HELD_MB
        assert allowance.is_short
        allowance.look()
        # And what was not paused, or is closed, has room while it is awake
        with allowance.awake():
            assert not allowance.is_short
        controls.wanted_mb = 80
        allowance.look()
        with allowance.awake():
            allowance.close()
            assert not allowance.is_short


@contextmanager
def taken(allowance: Allowance, sent: tuple[int, int, bool]) -> Iterator[None]:
    serial, allowance_mb, is_grant = sent
    if is_grant:
        with allowance.action(allowance_mb, (1, serial)):
            yield
    else:
        allowance.allow(allowance_mb, (1, serial))
        yield


@given(st.permutations(range(1, 7)), st.lists(st.booleans(), min_size=6, max_size=6))
def test_in_whatever_order_they_come_and_however_often_the_last_one_counts(order: list[int], grants: list[bool]) -> None:
    # Given an action that runs, and growing allowances, some of which come with grants
    allowance = environment()
    with allowance.action(60, (1, 0)), ExitStack() as running:
        # When all come in any order, and each other one twice; then the last counts
        for serial in [*order, *order[::2]]:
            running.enter_context(taken(allowance, (serial, 60 + 10 * serial, grants[serial - 1])))
        assert allowance.allowed_mb == 120
