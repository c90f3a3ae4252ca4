"""SandboxFusion's shape, by its unchanged client where that shows it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.clients.rows import shows
from tests.gateway.conftest import Served

fusion = pytest.importorskip("sandbox_fusion", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def endpoint(served: Served) -> str:
    """Return the address that a client is given, which has the token in it."""
    return served.url.replace("://", f"://tangram:{served.token('fusion')}@")


@pytest.fixture(scope="module")
def caller(served: Served) -> Iterator[httpx.Client]:
    with served.http("fusion") as client:
        yield client


def run(endpoint: str, code: str, language: str = "python", *, attempts: int = 1, **fields: Any) -> Any:
    return fusion.run_code(fusion.RunCodeRequest(code=code, language=language, **fields), endpoint=endpoint, max_attempts=attempts)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def open_environments(served: Served) -> list[Any]:
    return served.live.rows("SELECT id FROM environments WHERE job = 'fusion' AND ended_at IS NULL")


@shows("sandbox-fusion", "run_code")
def test_code_runs_with_its_input_and_its_files(served: Served, endpoint: str) -> None:
    done = run(
        endpoint,
        "import sys\nprint(sys.stdin.read() + open('in/data.txt').read())\nopen('out.txt', 'w').write('made')",
        stdin="from stdin, ",
        files={"in/data.txt": encoded("from a file"), "not-there.txt": None},
        fetch_files=["out.txt", "missing.txt"],
    )
    assert (done.status, done.run_result.status, done.run_result.return_code) == ("Success", "Finished", 0)
    assert done.run_result.stdout == "from stdin, from a file\n"
    assert done.compile_result is None
    assert done.files == {"out.txt": encoded("made")} and "missing.txt" in done.message
    assert 0 < done.run_result.execution_time < 60
    served.live.until(lambda: not open_environments(served))


@shows("sandbox-fusion", "run_code_async")
def test_the_async_client_is_served_alike(endpoint: str) -> None:
    request = fusion.RunCodeRequest(code="echo $((6 * 7))", language="bash")
    assert asyncio.run(fusion.run_code_async(request, endpoint=endpoint, max_attempts=1)).run_result.stdout == "42\n"


@shows("sandbox-fusion", "run_code")
@shows("sandbox-fusion", "summary_run_code_result")
def test_code_that_fails_is_failed_and_no_error(endpoint: str) -> None:
    done = run(endpoint, "import sys\nprint('so far')\nsys.exit(3)")
    ran = done.run_result
    assert (done.status, ran.status, ran.return_code, ran.stdout) == ("Failed", "Finished", 3, "so far\n")
    mapping = fusion.SummaryMapping(RunFailed="wrong", RunTimeout="slow", CompileFailed="broken")
    assert fusion.summary_run_code_result(done, mapping) == "wrong"


@shows("sandbox-fusion", "run_code (run_timeout)")
def test_code_that_runs_for_too_long_is_over_its_limit_with_what_it_printed(endpoint: str) -> None:
    done = run(endpoint, "echo so far; sleep 60", "bash", run_timeout=2)
    assert (done.status, done.run_result.status, done.run_result.return_code) == ("Failed", "TimeLimitExceeded", None)
    assert done.run_result.stdout == "so far\n"


@shows("sandbox-fusion", "run_code (compiled)", "works; compilers are those of the image")
def test_a_compiled_language_has_a_result_of_its_compiler(endpoint: str) -> None:
    program = '#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * 2 << "\\n"; }'
    done = run(endpoint, program, "cpp", stdin="21", compile_timeout=100)
    assert (done.status, done.compile_result.return_code, done.run_result.stdout) == ("Success", 0, "42\n")
    broken = run(endpoint, "int main() { return x; }", "cpp", compile_timeout=100)
    assert (broken.status, broken.compile_result.status, broken.run_result) == ("Failed", "Finished", None)
    assert broken.compile_result.return_code != 0 and "not declared" in broken.compile_result.stderr


@pytest.mark.parametrize("memory_mb", [None, 1024])
def test_a_stack_may_be_as_large_as_the_memory_and_is_large_without_a_limit(caller: httpx.Client, memory_mb: int | None) -> None:
    # 16 MB, which is twice of what a stack may have unless the system is told otherwise
    body = {"language": "cpp", "code": "int main() { volatile int a[4000000]; a[0] = 3; return a[0]; }", "compile_timeout": 100}
    limit = {} if memory_mb is None else {"memory_limit_MB": memory_mb}
    assert caller.post("/run_code", json={**body, **limit}).json()["run_result"]["return_code"] == 3


@pytest.fixture(scope="module")
def enforced(served: Served) -> bool:
    """Return whether the node holds environments to what they use of memory, and not to what they map."""
    (labels,) = served.live.rows("SELECT description FROM nodes WHERE name = 'cpu-0'")
    return "memory:enforced" in str(labels)


def test_a_stack_of_a_thread_is_no_smaller_for_a_memory_limit(enforced: bool, caller: httpx.Client) -> None:
    code = """#include <thread>
int main() { std::thread([] { volatile char a[6000000]; for (int i = 0; i < 6000000; i += 4096) a[i] = 1; }).join(); return 3; }"""
    body = {"language": "cpp", "code": code, "compile_timeout": 100, "memory_limit_MB": 1024}
    if not enforced:
        pytest.skip("threads have 2 MiB where the limit is on what a process maps")
    assert caller.post("/run_code", json=body).json()["run_result"]["return_code"] == 3


@pytest.mark.parametrize("limit", [{}, {"memory_limit_MB": 1024}])
def test_a_crash_is_the_exit_code_and_no_word_of_a_shell(caller: httpx.Client, limit: dict[str, int]) -> None:
    for what, number in (("getpid", 11), ("getppid", 9)):
        code = f"import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos.kill(os.{what}(), {number})"
        done = caller.post("/run_code", json={"language": "python", "code": code, **limit}).json()["run_result"]
        assert (done["return_code"], done["stderr"]) == (128 + number, "last words\n")


@shows(
    "sandbox-fusion",
    "run_code (memory_limit_MB)",
    "differs: by HTTP, limits what each process may map, and books as much on the node; the client itself never sends it",
)
def test_a_memory_limit_holds(caller: httpx.Client) -> None:
    body = {"language": "python", "code": "x = bytearray(400 * 2**20)"}
    done = caller.post("/run_code", json={**body, "memory_limit_MB": 256}).json()
    assert done["status"] == "Failed" and ("MemoryError" in done["run_result"]["stderr"] or "memory" in done["message"]), done
    assert caller.post("/run_code", json={**body, "memory_limit_MB": -1}).json()["status"] == "Success"
    assert "memory_limit_MB" not in fusion.RunCodeRequest(**body, memory_limit_MB=256).json()


def test_what_a_program_maps_and_does_not_use_is_no_memory_where_that_is_enforced(enforced: bool, caller: httpx.Client) -> None:
    # As Java, node and programs of Go with the race detector do
    body = {"language": "python", "code": "import mmap; mmap.mmap(-1, 4 << 30, mmap.MAP_PRIVATE); print('ran')", "memory_limit_MB": 256}
    done = caller.post("/run_code", json=body).json()
    assert ("ran" in done["run_result"]["stdout"]) == enforced, done


@pytest.mark.parametrize("memory_mb", [1, 3])
def test_a_program_that_cannot_start_in_its_memory_has_failed(caller: httpx.Client, memory_mb: int) -> None:
    # When there is less memory than the shell needs, or than the program needs; then that is no failure of ours, which callers try again
    answer = caller.post("/run_code", json={"language": "python", "code": "print(1)", "memory_limit_MB": memory_mb})
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert (done["status"], done["run_result"]["status"], done["run_result"]["stdout"]) == ("Failed", "Finished", "")
    assert done["run_result"]["return_code"] != 0
    assert done["message"] or "failed to map" in done["run_result"]["stderr"]


@shows("sandbox-fusion", "run_code (no such tool)", "differs: SandboxError where the image lacks the language")
def test_a_tool_that_is_missing_is_no_verdict(served: Served, caller: httpx.Client) -> None:
    done = caller.post("/run_code", json={"language": "lean", "code": "1"}).json()
    assert (done["status"], done["run_result"]) == ("SandboxError", None)
    assert "needs lean" in done["message"]
    assert 'infra_failed_total{cause="missing_tool",shape="run_code"} 1.0' in httpx.get(f"{served.url}/metrics").text


def test_users_add_languages(caller: httpx.Client) -> None:
    done = caller.post("/run_code", json={"language": "shout", "code": "hello"}).json()
    assert (done["status"], done["run_result"]["stdout"]) == ("Success", "HELLO")


@pytest.mark.parametrize(
    "change",
    [
        {"language": "klingon"},
        {"code": None},
        {"run_timeout": 0},
        {"files": {"../up": ""}},
        {"files": {"/etc/passwd": ""}},
        {"files": {"a": "?"}},
        {"fetch_files": ["../up"]},
    ],
)
def test_a_wrong_body_is_422(caller: httpx.Client, change: dict[str, Any]) -> None:
    answer = caller.post("/run_code", json={"language": "python", "code": "1", **change})
    assert answer.status_code == 422 and answer.json()["detail"]


@shows("sandbox-fusion", "run_code (full queue)", "works; 504 in time, and the retry gets the same run")
def test_a_call_that_waits_in_the_queue_is_504_in_time_and_its_retry_gets_the_same_run(served: Served, caller: httpx.Client) -> None:
    # Given a node whose memory is taken
    body = {"language": "bash", "code": "echo ran", "run_timeout": 4, "compile_timeout": 1, "memory_limit_MB": 512}
    with served.http("blocker") as blocker, ThreadPoolExecutor(1) as thread:
        blocking = blocker.post("/api/v1/environments", json={"memory_mb": 4000}).json()["id"]
        # When code is to be run, the answer comes in time: 5 s of limits and 1 s of patience
        began = time.monotonic()
        assert caller.post("/run_code", json=body).status_code == 504
        assert 5.9 < time.monotonic() - began < 100
        # Then the same body again, as often as callers send it, waits for the run that was begun, and no other run is made
        again = thread.submit(caller.post, "/run_code", json=body)
        blocker.delete(f"/api/v1/environments/{blocking}")
        answer = again.result()
        while answer.status_code == 504:
            answer = caller.post("/run_code", json=body)
        assert answer.json()["run_result"]["stdout"] == "ran\n"
    opens = "SELECT count(*) FROM actions WHERE job = 'fusion' AND kind = 'cpu.open' AND header LIKE '%\"memory_mb\":[512]%'"
    assert served.live.rows(opens) == [(1,)]


def test_a_retry_after_a_broken_connection_gets_the_same_run(served: Served, caller: httpx.Client) -> None:
    def environments() -> set[str]:
        return {row[0] for row in served.live.rows("SELECT id FROM environments WHERE job = 'fusion'")}

    # Given a run whose caller has gone away before there is an answer, which the gateway has noticed
    before = environments()
    body = {"language": "bash", "code": "sleep 3; date +%N", "run_timeout": 20}
    with served.store() as store:
        earlier = set(store.keys("tangram-gw-abandoned-*"))
        with pytest.raises(httpx.ReadTimeout):
            caller.post("/run_code", json=body, timeout=0.7)
        served.live.until(lambda: set(store.keys("tangram-gw-abandoned-*")) - earlier)
    # When it comes again, then it gets that run, and there is no other one
    environment = caller.post("/run_code", json=body).json()["executor_pod_name"]
    assert environments() - before == {environment}


@shows("sandbox-fusion", "run_jupyter", "differs: plain Python without magics where the image has no IPython")
def test_cells_share_one_interpreter(endpoint: str) -> None:
    cells = ["a = 123", "a", "print(a)", "import sys; sys.stderr.write('oops'); None", "raise RuntimeError('wrong')", "a + 1"]
    request = fusion.RunJupyterRequest(cells=cells, files={"in.txt": encoded("x")}, fetch_files=["in.txt"])
    done = fusion.run_jupyter(request, endpoint=endpoint, max_attempts=1)
    assert (done.status, done.driver.status, done.files) == ("Failed", "Finished", {"in.txt": encoded("x")})
    assert [cell.stdout for cell in done.cells] == ["", "", "123\n", "", "", ""]
    assert done.cells[3].stderr == "oops"
    assert [cell.display for cell in done.cells if cell.display] == [[{"text/plain": "123"}], [{"text/plain": "124"}]]
    # And files named as modules are those of the cells, and take the place of no module that runs these
    files = {name: encoded("import os; mine = 'mine'") for name in ("code.py", "queue.py", "token.py", "own.py")}
    request = fusion.RunJupyterRequest(cells=["import code, own\nprint(own.mine)"], files=files)
    named = fusion.run_jupyter(request, endpoint=endpoint, max_attempts=1)
    assert (named.status, named.cells[0].stdout) == ("Success", "mine\n"), named
    (error,) = done.cells[4].error
    assert (error["ename"], error["evalue"]) == ("RuntimeError", "wrong") and any("wrong" in line for line in error["traceback"])


@shows("sandbox-fusion", "run_jupyter (cell_timeout)")
def test_a_cell_that_runs_for_too_long_ends_the_notebook_with_what_there_is(endpoint: str) -> None:
    request = fusion.RunJupyterRequest(cells=["print(1)", "import time\nwhile True: time.sleep(0.01)", "print(3)"], cell_timeout=2)
    done = fusion.run_jupyter(request, endpoint=endpoint, max_attempts=1)
    assert done.status == "Failed" and [cell.stdout for cell in done.cells] == ["1\n", ""]
    assert done.cells[1].error[0]["ename"] == "CellTimeout"


@pytest.mark.parametrize(
    ("cell", "left", "said"),
    [
        ("import os; os._exit(0)", 0, "0 of 2 cells have a result: the interpreter ended with 0"),
        ("import os; os._exit(127)", 0, "0 of 2 cells have a result: the interpreter ended with 127"),
        ("import os; os.remove('.results.jsonl')", 0, "the results of the cells cannot be read: "),
        ("open('.results.jsonl', 'a').write('no result'); None", 1, "1 of 2 cells have a result"),
        ("print('x' * 70_000_000)", 2, "output of cells was dropped, being too long: 1"),
    ],
    ids=["ended", "ended as if it were missing", "removed", "written into", "long"],
)
def test_cells_without_a_result_are_no_success_and_the_answer_says_why(caller: httpx.Client, cell: str, left: int, said: str) -> None:
    done = caller.post("/run_jupyter", json={"cells": [cell, "assert 1 == 2"]}).json()
    assert (done["status"], len(done["cells"])) == ("Failed", left)
    assert said in done["message"], done["message"]
