"""Two shards as real processes: one stack, of which each scheduler has a node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.local.stack import StackPlan
from tangram import Action, Client, Cost
from tangram.client import Environment
from tangram.shards import shard_of
from tests.live.support import INCLUDE, Live, running

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def live(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    plan = StackPlan(nodes=2, shards=2, cores=2, memory_mb=4096, api_nodes=0, include=INCLUDE)
    with running(tmp_path_factory.mktemp("shards"), plan) as started:
        yield started


def opened(client: Client, shard: int) -> Environment:
    """Open environments until one is of this shard; close the others."""
    while shard_of((found := client.open()).id, 2) != shard:
        found.close()
    return found


def test_environments_and_actions_of_all_kinds_run_in_both_shards(live: Live) -> None:
    with live.client("both") as client:
        environments = [opened(client, shard) for shard in (0, 1)]
        for number, environment in enumerate(environments):
            assert environment.exec(f"echo {number}; cat > kept <<< {number}").stdout == f"{number}\n"
            assert environment.read_file("kept") == f"{number}\n".encode()
        lone = [client.submit(Action(kind="live.add", arguments={"x": n, "y": n}, cost=Cost.of(cores=1))) for n in range(12)]
        assert [handle.result(60) for handle in lone] == [2 * n for n in range(12)]
        # What is cancelled is found wherever it runs
        for environment in environments:
            running_command = environment.submit("sleep 1000")
            live.until(lambda id=running_command.id: live.rows(f"select status from actions where id = '{id}'") == [("running",)])
            running_command.cancel()
        live.until(lambda: live.rows("select count(*) from actions where status = 'cancelled'") == [(2,)])
    of_shards = dict(live.rows("select node, max(shard) from actions where job = 'both' and kind = 'cpu.open' group by node"))
    assert of_shards == {"cpu-0": 0, "cpu-1": 1}
    assert sorted(live.rows("select distinct node from actions where kind = 'live.add'")) == [("cpu-0",), ("cpu-1",)]
