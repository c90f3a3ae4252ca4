"""Bad input: one line on standard error, exit 2, no traceback; soon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.celery import make_app
from app.journal.database import open_engine
from app.journal.writing import SqlJournal
from scheduler.live.entries import NodeChanged
from tangram.errors import StackUnreachable, TangramError
from tangram.settings import Settings
from tangram.wire import CONTROL_QUEUE
from tests.cli.forked import environment, forked
from tests.cli.support import tangram
from tests.conftest import RedisServer, RedisUrls
from tests.journals import new_journal

LINE = (
    '{"schema": "tangram.trace/1", "trajectory": "t1", "arrival_s": 0.0, "steps": [{"think_s": 0.0, "action": '
    '{"kind": "cpu.exec", "units": [1], "work_s": 0.05, "command": "true"}}]}'
)
NOWHERE = {"TANGRAM_BROKER_URL": "redis://127.0.0.1:1/0", "TANGRAM_RESULT_URL": "redis://127.0.0.1:1/0"}
HEAD = '{"schema": "tangram.trace/1"}'
MODEL = '[services.rm]\nengine = "torch"\nmodel = "model"\ntask = "score"\ncells = [1]\nmemory_mb = 100\n'
JOURNAL = {"DATABASE_URL": "sqlite:///x.sqlite"}


@pytest.fixture
def trace(tmp_path: Path) -> None:
    """Write a trace into the folder of the test."""
    (tmp_path / "trace.jsonl").write_text(f"{HEAD}\n{LINE}\n")


def refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    """Check that a command said one line, with these words, and exited with 2."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tangram: ")
    for words in expected:
        assert words in lines[0]
    assert not done.stdout


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        ("nonsense", {}, "nonsense"),
        ("replay missing.jsonl --simulate", {}, "missing.jsonl"),
        ("replay odd.jsonl --simulate", {}, "odd.jsonl"),
        ("replay trace.jsonl", {}, "--simulate or --live"),
        ("replay trace.jsonl --simulate --policy best", {}, "best"),
        ("replay trace.jsonl --simulate --policy fcfs --without resizing", {}, "resizing"),
        ("replay trace.jsonl --simulate --compare paper,static:1 --without resizing", {}, "--without"),
        ("replay trace.jsonl --simulate --spread -1", {}, "--spread"),
        ("replay trace.jsonl --simulate --cores 999999999", {}, "--cores 999999999"),
        ("replay trace.jsonl --simulate --cores 2000 --nodes 1000", {}, "1000 nodes: at most 1000000"),
        ("replay trace.jsonl --simulate --overhead 1e20", {}, "--overhead"),
        ("plan trace.jsonl --target-act 1 --overhead 1e20", {}, "--overhead"),
        ("plan trace.jsonl --target-act 1 --processes 99999999999", {}, "--processes"),
        ("plan trace.jsonl --no-worse-than fcfs --than-cores 999999999", {}, "--than-cores 999999999"),
        ("demo --speed nan", {}, "--speed"),
        ("up --policy best", {}, "best"),
        ("import swe-agent missing.traj", {}, "missing.traj"),
        ("record missing.toml", {}, "missing.toml"),
        ("worker tpu", {}, "tpu"),
        ("worker cpu --log-level banana", {}, "banana"),
        ("up --nodes 99999999999", {}, "--nodes"),
        ("report", {}, "no journal"),
        ("report j -o - --json", {}, "standard output"),
        ("worker cpu", {}, "no stack is running"),
        ("scheduler", {}, "TANGRAM_DATABASE_URL"),
        ("metrics", {}, "set TANGRAM_METRICS_PORT to the port to listen at"),
        ("scheduler", {"SHARES": "a:2"}, "TANGRAM_SHARES: Value error, 'a:2' is not like name=2,name=1, with each name once"),
        ("scheduler", {"SHARES": "a=0"}, "TANGRAM_SHARES: a: Input should be greater than 0"),
        ("scheduler", {"SHARD": "1"}, "TANGRAM_SHARD: Value error, TANGRAM_SHARDS is 1: name at most 0"),
        ("scheduler", {**JOURNAL, "WITHOUT": "wheels"}, "policy 'elastic' has no part 'wheels' to go without"),
        ("scheduler", {**JOURNAL, "EVENT_LOG": "/dev/null/log"}, "/dev/null/log: Not a directory"),
        ("worker gpu", {"SHARD": "1", "SHARDS": "2"}, "TANGRAM_SHARD=1: shards other than 0 have CPU workers only"),
        ("up --nodes 2", {"SHARDS": "3"}, "TANGRAM_SHARDS=3: each shard needs a CPU node, name as many with --nodes"),
        ("worker cpu", {"CORES": "abc"}, "TANGRAM_CORES"),
        ("worker cpu", {"BEAT_S": "0"}, "TANGRAM_BEAT_S"),
        ("worker cpu", {"QUEUE_LIMIT": ""}, "TANGRAM_QUEUE_LIMIT"),
        ("status", {"STATE_DIR": ""}, "TANGRAM_STATE_DIR: Value error, is empty: name a path, or do not set it"),
        ("status", {"EVENT_LOG": ""}, "TANGRAM_EVENT_LOG: Value error, is empty"),
        ("worker cpu", {"BROKER_URL": "redis://127.0.0.1:1/0"}, "TANGRAM_RESULT_URL is not set"),
    ],
)
@pytest.mark.usefixtures("trace")
def test_wrong_words_and_settings_are_refused_in_one_line(tmp_path: Path, words: str, settings: dict[str, str], expected: str) -> None:
    (tmp_path / "odd.jsonl").write_text(f"{HEAD}\n\x00\xff\n", encoding="latin-1")
    variables, starts_celery = {f"TANGRAM_{name}": value for name, value in settings.items()}, words.startswith("worker")
    done = tangram(tmp_path, *words.split(), **variables) if starts_celery else forked(*words.split(), cwd=tmp_path, **variables)
    refused(done, expected)


def test_without_words_the_help_is_shown(tmp_path: Path) -> None:
    done = forked(cwd=tmp_path)
    assert done.returncode == 2
    assert "Usage" in done.stderr
    assert forked("--help", cwd=tmp_path).returncode == 0


def test_celery_tools_look_nowhere_else_than_at_the_given_address() -> None:
    with pytest.raises(StackUnreachable, match="TANGRAM_RESULT_URL is not set"):
        make_app(Settings(broker_url="redis://b"))


@pytest.mark.parametrize("text", ["not read", '{"broker_url": "redis://b", "result_url": "redis://r"}'])
def test_the_health_of_a_stack_whose_file_cannot_be_read_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    refused(tangram(tmp_path, "health", "cpu", TANGRAM_STATE_DIR=str(tmp_path)), "stack.json is no stack file")


@pytest.fixture
def deaf_port() -> object:
    """Return a port on which somebody listens and never answers."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        yield deaf.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["worker", "cpu"], "deaf"),
        (["worker", "api"], "amqp"),
        (["scheduler"], "refusing"),
        (["scheduler"], "amqp"),
        (["replay", "trace.jsonl", "--live"], "refusing"),
    ],
)
def test_a_stack_that_is_not_there_is_said_soon(trace: None, tmp_path: Path, words: list[str], kind: str, deaf_port: int) -> None:
    database = new_journal(tmp_path / "j.sqlite")
    result = "redis://:secret@127.0.0.1:1/0" if kind != "deaf" else f"redis://:secret@127.0.0.1:{deaf_port}/0"
    broker = "amqp://guest:secret@127.0.0.1:1//" if kind == "amqp" else result
    variables = {"TANGRAM_BROKER_URL": broker, "TANGRAM_RESULT_URL": result, "TANGRAM_DATABASE_URL": database}
    done = tangram(tmp_path, *words, TANGRAM_CONNECT_TIMEOUT_S="1", **variables)
    refused(done, f"@127.0.0.1:{deaf_port if kind == 'deaf' else 1}/")
    assert "reached" in done.stderr and "secret" not in done.stderr


@pytest.mark.parametrize(
    ("words", "url", "expected"),
    [
        (["status"], "postgresql+psycopg://someone:secret@127.0.0.1:1/x", ""),
        (["status"], "mysql://x", "use sqlite"),
        (["status"], "nonsense", "not a database URL"),
        (["status"], "postgresql+psycopg://someone:p@s/secret@127.0.0.1:1/x", "/ and @ in a password are %2F and %40"),
        (["report", "last"], "sqlite:///missing", "there is no such file"),
        (["health", "scheduler"], "sqlite:///missing", "there is no such file"),
        *(
            (words, "sqlite:///empty.sqlite", "tangram db upgrade")
            for words in (["status"], ["report", "last"], ["scheduler"], ["health", "scheduler"])
        ),
    ],
)
def test_a_database_that_cannot_be_used_is_said(tmp_path: Path, words: list[str], url: str, expected: str) -> None:
    (tmp_path / "empty.sqlite").touch()
    done = forked(*words, cwd=tmp_path, TANGRAM_DATABASE_URL=url, TANGRAM_CONNECT_TIMEOUT_S="1", **NOWHERE)
    refused(done, expected)
    assert "secret" not in done.stderr and not (tmp_path / "missing").exists()


def test_a_new_journal_and_tokens_that_are_revoked_are_told_beside_the_output(tmp_path: Path) -> None:
    database = {"TANGRAM_DATABASE_URL": f"sqlite:///{tmp_path / 'j.sqlite'}"}
    first, again = (forked("db", "upgrade", cwd=tmp_path, **database) for _ in range(2))
    assert (first.stdout, first.stderr) == ("", f"made a new journal: {database['TANGRAM_DATABASE_URL']}\n")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert forked("token", "new", "--job", "j", cwd=tmp_path, **database).returncode == 0
    revoked = forked("token", "revoke", "--job", "j", cwd=tmp_path, **database)
    assert (revoked.stdout, revoked.stderr) == ("1\n", "tokens of j that counted until now: 1\n")


@pytest.mark.parametrize("words", [["report"], ["report", "x", "--against"], ["export"], ["token", "revoke", "--job"], ["envs", "--job"]])
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, redis_urls: RedisUrls, words: list[str]) -> None:
    urls = {"TANGRAM_BROKER_URL": redis_urls.broker, "TANGRAM_RESULT_URL": redis_urls.result}
    database = new_journal(tmp_path / "j.sqlite")
    refused(forked(*words, "\udcff", cwd=tmp_path, TANGRAM_DATABASE_URL=database, **urls))


def test_a_closed_standard_error_is_no_error_and_processes_that_a_command_starts_have_it_so_too(tmp_path: Path) -> None:
    script = "import atexit, os; atexit.register(os.system, 'readlink /proc/self/fd/2'); from app.cli.main import main; main()"
    command = f'{sys.executable} -c "{script}" --version 2>&-'
    done = subprocess.run(["sh", "-c", command], env=environment(tmp_path), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.startswith("tangram ") and done.stdout.endswith("\n/dev/null\n"), done


def test_a_user_without_a_home_is_told_which_setting_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a user that the password file does not have
    def unknown(_number: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_STATE_HOME", "TANGRAM_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TangramError, match="set TANGRAM_STATE_DIR"):
        Settings()


@pytest.mark.parametrize(
    ("variables", "words", "printed"),
    [
        ("", "--version <&- >&- 2>&-", ""),
        ("PYTHONIOENCODING=ascii", "replay trace.jsonl --simulate", "\\xb5"),
    ],
)
def test_an_output_that_is_closed_or_lacks_a_character_is_no_error(
    trace: None, tmp_path: Path, variables: str, words: str, printed: str
) -> None:
    command = f"cd {tmp_path} && {variables} {sys.executable} -m tangram {words}"
    done = subprocess.run(["sh", "-c", command], env=environment(tmp_path), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "") and printed in done.stdout, done


def test_where_no_scheduler_answers_the_state_says_so_by_its_exit_code(tmp_path: Path) -> None:
    # Given no journal; when the state is asked for; then a line says so
    done = forked("status", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1) and "no journal" in done.stderr
    # Given a journal alone; then what it holds is shown, and without replays a report asks for a job
    database = new_journal(tmp_path / "j.sqlite")
    done = forked("status", "--json", cwd=tmp_path, TANGRAM_DATABASE_URL=database, **NOWHERE)
    assert (done.returncode, json.loads(done.stdout)["scheduler"]) == (3, None)
    refused(forked("report", cwd=tmp_path, TANGRAM_DATABASE_URL=database), "name a job")


def test_a_setting_that_there_is_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    done = forked("status", cwd=tmp_path, TANGRAM_GATWAY_PORT="1")
    assert done.stderr.splitlines()[0] == "tangram: there is no setting TANGRAM_GATWAY_PORT; TANGRAM_GATEWAY_PORT is one"


@pytest.mark.parametrize("setting", ["TANGRAM_GATEWAY_PORT", "TANGRAM_WEB_PORT", "TANGRAM_METRICS_PORT"])
def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = forked("up", cwd=tmp_path, **{setting: str(port)})
    refused(done, f"{setting}: port {port} is taken by another program (pid ")
    assert not (tmp_path / "state").exists()


def test_an_address_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    database = new_journal(tmp_path / "j.sqlite")
    done = tangram(tmp_path, "web", "--host", "192.0.2.1", "--port", "8090", TANGRAM_DATABASE_URL=database, **NOWHERE)
    refused(done, "192.0.2.1 port 8090 cannot be used: Cannot assign requested address")


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ('[services.rm]\ntask = "score"\n', "services.rm"), (MODEL, "model")])
def test_a_services_file_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "services.toml").write_text(text)
    refused(forked("up", cwd=tmp_path, TANGRAM_SERVICES_FILE="services.toml"), "services.toml: ", said)
    assert not (tmp_path / "state").exists()


def test_ports_that_there_are_not_are_refused_before_anything_starts(tmp_path: Path) -> None:
    services = str(tmp_path / "services.toml")
    Path(services).write_text("[quotas.search]\nrate_per_s = 10\n")
    done = forked("up", cwd=tmp_path, TANGRAM_METRICS_PORT="65534", TANGRAM_SERVICES_FILE=services)
    refused(done, "TANGRAM_METRICS_PORT", "use 1 to 65531")
    assert not list((tmp_path / "state").iterdir())


def test_a_drain_that_no_scheduler_takes_up_says_so_and_counts_for_the_next_one(tmp_path: Path, redis_urls: RedisUrls) -> None:
    # Given a journal with a node, and nobody who leads
    database = new_journal(tmp_path / "j.sqlite")
    engine = open_engine(database)
    with SqlJournal(engine) as journal:
        journal.write([NodeChanged(name="cpu-0", state="up", description={"name": "cpu-0"}, at=1.0)])
    engine.dispose()
    urls = {"TANGRAM_BROKER_URL": redis_urls.broker, "TANGRAM_RESULT_URL": redis_urls.result, "TANGRAM_DATABASE_URL": database}
    done = tangram(tmp_path, "drain", "cpu-0", TANGRAM_TAKEOVER_S="0.5", TANGRAM_CONNECT_TIMEOUT_S="2", **urls)
    refused(done, "no scheduler has taken the request up in 2.5 s; the next one that is active will (`tangram status`)")
    with redis_urls.client() as client:
        assert client.llen(CONTROL_QUEUE) == 1


@pytest.mark.parametrize("folder", ["state", "/proc/no/such"])
def test_a_state_folder_that_is_a_file_or_cannot_be_made_is_said(trace: None, tmp_path: Path, folder: str) -> None:
    (tmp_path / "state").touch()
    demo = ["demo", "--state-dir", folder]
    for words in (["up"], ["replay", "trace.jsonl", "--live"], ["db", "upgrade"], demo):
        said = f"the state folder {folder} cannot be made", f"set {'--state-dir' if words is demo else 'TANGRAM_STATE_DIR'} to another one"
        refused(forked(*words, cwd=tmp_path, TANGRAM_STATE_DIR=folder), *said)


def test_a_stack_of_this_machine_says_which_addresses_it_does_not_take(tmp_path: Path) -> None:
    urls = {"TANGRAM_BROKER_URL": "redis://elsewhere", "TANGRAM_DATABASE_URL": "sqlite:///elsewhere"}
    done = forked("up", cwd=tmp_path, **urls, TANGRAM_STATE_DIR="/proc/no/such")
    said = "this stack has addresses of its own: unset TANGRAM_BROKER_URL, TANGRAM_DATABASE_URL, or commands and clients go there instead"
    assert done.stderr.splitlines()[0] == said


def test_a_module_of_tasks_that_there_is_not_is_said_before_anything_starts(tmp_path: Path) -> None:
    refused(forked("up", "--include", "nope.tasks", cwd=tmp_path), "--include nope.tasks: there is no module nope")
    assert not (tmp_path / "state").exists()
    refused(tangram(tmp_path, "worker", "api", "--include", "nope.tasks"), "--include nope.tasks: there is no module nope")
    refused(tangram(tmp_path, "worker", "api", "--include", ""), "--include is empty: name a module")
    # And one of the folder in which the worker is started is found
    (tmp_path / "mine.py").touch()
    refused(tangram(tmp_path, "worker", "api", "--include", "mine", PYTHONSAFEPATH="1"), "no stack is running")


def test_a_worker_says_that_its_user_of_redis_may_not_write(tmp_path: Path, own_redis: RedisServer) -> None:
    with own_redis.client() as redis:
        redis.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "&*", "+@read", "+@connection")
    url = own_redis.result.replace("://", "://reader:secret@")
    done = tangram(tmp_path, "worker", "api", TANGRAM_BROKER_URL=url, TANGRAM_RESULT_URL=url)
    refused(done, "does not take the name of the node: ", "has no permissions to run the 'set' command")
    assert "secret" not in done.stderr


def test_a_model_folder_that_is_none_is_said(tmp_path: Path, redis_urls: object) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "services.toml").write_text(MODEL)
    urls = {"TANGRAM_BROKER_URL": redis_urls.broker, "TANGRAM_RESULT_URL": redis_urls.result}  # type: ignore[attr-defined]
    refused(tangram(tmp_path, "worker", "gpu", TANGRAM_SERVICES_FILE="services.toml", **urls), "model")
    refused(tangram(tmp_path, "worker", "gpu", TANGRAM_SERVICES_FILE="missing.toml", **urls), "missing.toml")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said(trace: None, tmp_path: Path) -> None:
    (tmp_path / "a.traj").write_text(
        '{"trajectory": [{"action": "ls", "observation": "", "execution_time": 0.1}], "environment": "x", "info": {}}'
    )
    assert forked("import", "swe-agent", "a.traj", cwd=tmp_path).returncode == 0
    refused(forked("import", "swe-agent", "a.traj", "-o", "/dev/full", cwd=tmp_path), "No space left")
    with open("/dev/full", "w") as full:
        for words in (
            ["import", "swe-agent", "a.traj"],
            ["replay", "trace.jsonl", "--simulate", "--json"],
            ["replay", "trace.jsonl", "--simulate"],
        ):
            done = tangram(tmp_path, *words, stdout=full.fileno())
            assert done.returncode == 2, done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert "No space left" in done.stderr


def test_an_interrupt_that_a_library_takes_for_its_own_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a library whose import is interrupted, and fails by something else
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise RecursionError from None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    # When it is needed
    done = forked("up", cwd=tmp_path)
    # Then that is told as any interrupt
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "tangram: interrupted"), done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_while_an_object_is_finalised_is_not_lost(tmp_path: Path) -> None:
    # Given a module in which an object is finalised just when the interrupt comes
    (tmp_path / "finalising.py").write_text(
        "import signal, time\nclass Last:\n    def __del__(self):\n        signal.raise_signal(signal.SIGTERM)\n"
        "Last()\ntime.sleep(60)\nraise SystemExit\n"
    )
    # When a command imports it, then that ends as any interrupt
    done = tangram(tmp_path, "up", "--include", "finalising")
    assert (done.returncode, done.stderr) == (130, "tangram: interrupted\n")


def test_an_interrupt_before_the_command_line_is_there_is_one_line(tmp_path: Path) -> None:
    # Given a server whose import is interrupted
    code = """
import importlib.abc, os, signal, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "app.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from tangram.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (130, "tangram: interrupted\n")
