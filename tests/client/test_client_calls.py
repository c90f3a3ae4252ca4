"""What a trainer asks for is checked before anything is sent, and exit of a program loses nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tangram import Action, AsyncClient, Client, InvalidAction, Settings, Snapshot, calls
from tangram.aio import AsyncEnvironment
from tangram.client import Environment
from tangram.elasticity import FLAT, Amdahl

PLACE = calls.Place("j", "t", "env-1")


WRONG_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"command": ""}, "command"),
    ({"command": "a\0b"}, "command"),
    ({"command": "a\ud800b"}, "command"),
    ({"command": None}, "command"),
    ({"units": "12"}, "cost.cores"),
    ({"queue_timeout_s": -1}, "queue_timeout_s"),
    ({"output_timeout_s": float("nan")}, "output_timeout_s"),
    ({"units": [1, 2], "efficiency": {1: 1.0}}, "efficiency"),
    ({"variables": {"A=B": "x"}}, "variables"),
    ({"variables": {"A": 1}}, "variables"),
    ({"interpreter": [b"sh"]}, "interpreter"),
    *(({name: given}, name) for name in ("fence", "merged", "stream", "stdin", "idempotent") for given in ("no", 0, None)),
]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        *((lambda words=words: calls.execute(PLACE, **{"command": "ls", **words}), field) for words, field in WRONG_WORDS),
        (lambda: calls.open_environment("j", trajectory="t", requires="gpu"), "requires"),
        *((lambda given=given: calls.open_environment("j", requires=given), "requires") for given in (3, None, {"a": 1})),
        (lambda: calls.open_environment("j", trajectory="t", memory_mb=0), "cost.memory_mb"),
        (lambda: calls.open_environment("j", image=3), "image"),  # type: ignore[arg-type]
        (lambda: calls.open_environment("j", snapshot="kept:1"), "snapshot"),  # type: ignore[arg-type]
        (lambda: calls.execute(PLACE, "ls", efficiency=0.5), "efficiency"),  # type: ignore[arg-type]
        (lambda: calls.close_session(PLACE, None), "session"),  # type: ignore[arg-type]
        (lambda: calls.read_file(PLACE, "a" * 100_000), "path"),
        (lambda: calls.request(PLACE, 80, body="\udcff"), "body"),
        (lambda: calls.call("j", "q", url="http://x", body="\udcff"), "body"),
        (lambda: calls.call("j", "q", url="http://x", body=5), "body"),  # type: ignore[arg-type]
        *((lambda given=given: calls.call("j", "q", url="http://x", headers=given), "headers") for given in (3, "A: b", {"A": 1})),
        *((lambda given=given: calls.score("j", "rm", [1], {"units": given}), "cost.cells") for given in (0.5, object())),
        (lambda: calls.open_environment("j", trajectory="t", image="i", snapshot=Snapshot("s", "n")), "image"),
        (lambda: calls.write_file(PLACE, "a", 5), "data"),  # type: ignore[arg-type]
        (lambda: calls.write_file(PLACE, "a", b"", mode=0o7777), "mode"),
        (lambda: calls.read_file(PLACE, ""), "path"),
        (lambda: calls.read_file(PLACE, b"a"), "path"),  # type: ignore[arg-type]
        (lambda: calls.execute(PLACE, "ls", cwd=b"a"), "cwd"),  # type: ignore[arg-type]
        (lambda: Action(kind="my.task", arguments=[1]), "arguments"),  # type: ignore[arg-type]
        (lambda: calls.request(PLACE, 0), "port"),
        (lambda: calls.request(PLACE, 70000), "port"),
        (lambda: calls.request(PLACE, "80"), "port"),  # type: ignore[arg-type]
        (lambda: calls.request(PLACE, 80, "no/slash"), "path"),
        (lambda: calls.request(PLACE, 80, "/a b"), "path"),
        (lambda: calls.request(PLACE, 80, "/" + "x" * 9000), "path"),
        (lambda: calls.request(PLACE, 80, method="GET /"), "method"),
        (lambda: calls.request(PLACE, 80, method="CONNECT"), "method"),
        (lambda: calls.request(PLACE, 80, headers={"Upgrade": "websocket"}), "headers"),
        (lambda: calls.request(PLACE, 80, headers={"Content-Length": "5"}), "headers"),
        (lambda: calls.request(PLACE, 80, headers=[("X-Y", "a\r\nZ: b")]), "headers"),
        (lambda: calls.request(PLACE, 80, headers={"X Y": "a"}), "headers"),
        (lambda: calls.request(PLACE, 80, headers="X-Y: a"), "headers"),  # type: ignore[arg-type]
        (lambda: calls.request(PLACE, 80, headers=[("X-Y",)]), "headers"),  # type: ignore[list-item]
        (lambda: calls.request(PLACE, 80, headers=5), "headers"),  # type: ignore[arg-type]
        (lambda: calls.request(PLACE, 80, body=5), "body"),  # type: ignore[arg-type]
        (lambda: calls.request(PLACE, 80, body=bytes((64 << 20) + 1)), "body"),
        (lambda: calls.execute(PLACE, "ls", variables={}, env={}), "env"),
        (lambda: calls.execute(PLACE, "ls", env={"A=B": "x"}), "env"),
        (lambda: calls.execute(PLACE, "ls", env=["A=x"]), "env"),  # type: ignore[arg-type]
        (lambda: calls.execute(PLACE, "ls", variables="A=x"), "variables"),  # type: ignore[arg-type]
        (lambda: calls.score("j", "", [1], {}), "service"),
        (lambda: calls.score("j", "rm", "text", {}), "items"),
        (lambda: calls.logprobs("j", "rm", [1, 2], {}), "token_ids[0]"),  # type: ignore[list-item]
        (lambda: calls.logprobs("j", "rm", [[1], [2, -1]], {}), "token_ids[1]"),
        (lambda: calls.logprobs("j", "rm", [[1], [2, 0.5]], {}), "token_ids[1]"),  # type: ignore[list-item]
        (lambda: calls.logprobs("j", "rm", [[1]], {}, top_k=-1), "top_k"),
        (lambda: calls.logprobs("j", "rm", [[1]], {}, top_k=129), "top_k"),
        (lambda: calls.logprobs("j", "rm", [[1]], {}, top_k=True), "top_k"),
        (lambda: calls.generate("j", "rm", "text", None, None, None, {}), "prompts"),
        (lambda: calls.call("j", "", url="http://x"), "quota"),
        (lambda: calls.call("j", "q", url="file:///etc/passwd"), "url"),
        *((lambda method=method: calls.call("j", "q", url="http://x", method=method), "method") for method in ("GET /", "G\u00c9T")),
        (lambda: calls.call("j", "q", url="http://x", body=b"", json={}), "body"),
        (lambda: calls.call("j", "q", url="http://x", json=object()), "json"),
    ],
)
def test_wrong_words_are_named(make: Any, field: str) -> None:
    with pytest.raises(InvalidAction) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("method", "word", "option"),
    [
        *((client.open, "memory_gb", "memory_mb") for client in (Client, AsyncClient)),
        *((client.call, "uri", "url") for client in (Client, AsyncClient)),
        *((method, "timeout", "timeout_s") for kind in (Environment, AsyncEnvironment) for method in (kind.exec, kind.submit)),
        *((call, "timeout", "timeout_s") for call in (calls.open_environment, calls.execute, calls.request, calls.call)),
    ],
)
def test_a_word_that_is_no_option_names_the_method_and_the_nearest_option(method: Any, word: str, option: str) -> None:
    with pytest.raises(TypeError) as caught:
        method(PLACE, "x", **{word: 5})
    assert str(caught.value) == f"{method.__qualname__}() has no option {word!r}: did you mean {option}?"


@pytest.mark.parametrize("call", [calls.score, calls.logprobs, lambda *words: calls.generate(*words[:3], None, None, None, words[3])])
def test_no_option_of_a_service_is_dropped_in_silence(call: Any) -> None:
    with pytest.raises(TypeError, match="has no option 'timeout': did you mean timeout_s"):
        call("j", "s", [[1]], {"timeout": 5})


def test_an_environment_without_a_trajectory_is_one_of_its_own() -> None:
    opened = calls.open_environment("j")
    assert opened.trajectory == opened.environment != calls.open_environment("j").trajectory


def test_reading_is_idempotent_and_running_is_not() -> None:
    assert calls.read_file(PLACE, "a").idempotent
    assert calls.call("j", "q", url="http://x").idempotent
    assert not calls.call("j", "q", url="http://x", method="post").idempotent
    assert calls.call("j", "q", url="http://x", method="post", idempotent=True).idempotent
    assert not calls.write_file(PLACE, "a", b"").idempotent
    assert not calls.execute(PLACE, "ls").idempotent


def test_wrong_settings_are_refused_before_connecting() -> None:
    with pytest.raises(InvalidAction, match="settings: must be Settings"):
        Client("j", "redis://localhost")  # type: ignore[arg-type]


def test_a_client_refuses_what_is_no_action_and_no_name(peer: Any, settings: Settings) -> None:
    with Client(settings=settings) as client:
        for call in (
            lambda: client.submit(3),  # type: ignore[arg-type]
            lambda: client.cancel(trajectory=""),
            lambda: client.cancel(job=3),  # type: ignore[arg-type]
            lambda: next(client.output(3)),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidAction):
                call()


def test_a_wrong_job_is_refused_before_connecting() -> None:
    with pytest.raises(InvalidAction, match="job"):
        Client(job="")


def test_a_program_that_just_ends_has_sent_what_it_submitted(redis_urls: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from tangram import Action, Client, Settings\n"
        "client = Client(settings=Settings(broker_url=sys.argv[1], result_url=sys.argv[2]))\n"
        "for n in range(300): client.submit(Action(kind='my.task', arguments={'n': n}))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), redis_urls.broker, redis_urls.result], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with redis_urls.client() as redis:
        assert redis.llen("actions") == 300


def test_a_handle_keeps_its_client_alive(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: peer.HOLD
    handle = Client(settings=settings).submit(Action(kind="my.task"))
    gc.collect()
    peer.until(lambda: peer.seen)
    peer.store(handle.id, 3)
    assert handle.result(30) == 3


def test_a_command_of_several_amounts_is_hoped_to_be_parallel_until_something_else_is_said() -> None:
    hoped = calls.execute(PLACE, "CI=1 pytest -q", units=[1, 2, 4])
    said = calls.execute(PLACE, "make", units=[1, 2, 4], efficiency={1: 1.0, 2: 0.5, 4: 0.25})
    single = calls.execute(PLACE, "ls")
    # Then only the one that says nothing of its amounts is hoped for, and its class is its first word
    assert hoped.curve == Amdahl(calls.HOPED_PARALLEL_FRACTION)
    assert (hoped.action_class, single.action_class) == ("pytest", "ls")
    assert said.curve.speedup(4) == 1.0
    assert single.curve == FLAT


def test_a_path_may_be_one_of_pathlib() -> None:
    assert calls.execute(PLACE, "ls", cwd=Path("a") / "b").arguments["cwd"] == "a/b"
    assert calls.execute(PLACE, "ls", interpreter=[Path("/bin/sh"), "-c"]).arguments["interpreter"] == ["/bin/sh", "-c"]
    assert "cwd" not in calls.execute(PLACE, "ls", cwd="").arguments
    assert calls.read_file(PLACE, Path("a")).arguments == {**calls.read_file(PLACE, "a").arguments, "path": "a"}


def test_the_tokens_of_a_request_are_in_its_cost_beside_it() -> None:
    some, none = (calls.call("j", "llm", url="http://x", tokens=tokens) for tokens in (1500, 0))
    assert dict(some.cost.amounts) == {"quota:llm": (1,), "tokens:llm": (1500,)}
    assert dict(none.cost.amounts) == {"quota:llm": (1,)}
    assert Action.from_header(some.to_header()).cost.tokens("llm") == 1500
    for wrong in (-1, 1.5, True):
        with pytest.raises(InvalidAction, match="tokens"):
            calls.call("j", "llm", url="http://x", tokens=wrong)  # type: ignore[arg-type]


def test_an_environment_from_a_snapshot_goes_where_that_is() -> None:
    # Given a snapshot on a node; when an environment is to be opened from it; then it asks for the image and for that node
    action = calls.open_environment("j", trajectory="t", snapshot=Snapshot("kept:1", "n7"), requires=["fast"])
    assert action.arguments["image"] == "kept:1"
    assert action.requires == ("fast", "node:n7")
