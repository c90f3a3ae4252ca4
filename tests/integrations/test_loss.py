"""A node that dies while a solution is scored: not a score of 0, but the score of another attempt, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.local.stack import StackPlan
from tangram import AsyncClient
from tangram.integrations.sandbox import Sandbox
from tangram.integrations.verl_reward import ScoreFailed, compute_score
from tests.live.support import FAST_BEATS, Live, running


@pytest.fixture
def live(real_component: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    with running(tmp_path / "stack", StackPlan(nodes=2, cores=1, memory_mb=512, api_nodes=0, variables=dict(FAST_BEATS))) as started:
        for name, text in started.environment.items():
            monkeypatch.setenv(name, text)
        yield started


def kill_the_node_that_runs(live: Live, job: str) -> None:
    """Kill the node of a job as soon as a command of it runs there."""
    nodes: list[str] = []

    def found() -> bool:
        nodes[:] = [
            row[0] for row in live.rows(f"select node from actions where job = '{job}' and kind = 'cpu.exec' and status = 'running'")
        ]
        return bool(nodes)

    live.until(found)
    live.process(nodes[0]).kill()


async def test_a_node_that_dies_during_scoring_is_no_score(live: Live) -> None:
    # Given a check that passes after a while
    scoring = asyncio.create_task(
        compute_score("sums", "x = 1", "sleep 2; python3 -c 'import solution; assert solution.x == 1'", job="fresh")
    )
    # When its node dies, then the score is that of another attempt
    await asyncio.to_thread(kill_the_node_that_runs, live, "fresh")
    assert await scoring == {"score": 1.0, "exit_code": 0}
    # And where the environment cannot be had again, there is an error
    async with AsyncClient("kept") as client:
        place = (await Sandbox.open(client, trajectory="t", detached=True)).place
        kept = {"job": place.job, "trajectory": place.trajectory, "environment": place.environment}
        scoring = asyncio.create_task(compute_score("sums", "", "sleep 60", {"tangram": kept}, job="kept"))
        await asyncio.to_thread(kill_the_node_that_runs, live, "kept")
        with pytest.raises(ScoreFailed, match="there is no score of a solution of sums"):
            await scoring
