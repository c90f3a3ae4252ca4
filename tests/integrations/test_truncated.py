"""A result of which output is left out: every class says so in the words of its framework, which is stood in for where it is missing."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tangram.action import Action
from tangram.calls import Place
from tangram.errors import ActionError, ActionFailed, EnvironmentLost
from tangram.integrations import docker_cli, sandbox, verl_reward
from tangram.integrations.sandbox import Sandbox
from tangram.results import FINISHED, LEFT_OUT, Act, Chunk, ExecResult, SubmissionCut


def result(stdout: str, *, truncated: bool, exit_code: int = 0, reason: str = "") -> ExecResult:
    act, how = Act(queue_s=0.0, overhead_s=0.0, execution_s=0.0), {"status": "succeeded", "exit_code": exit_code, "reason": reason}
    return ExecResult(**how, stdout=stdout, stderr="", truncated=truncated, dop=1, act=act)  # type: ignore[arg-type]


class Anything(Exception):
    """What a framework has: a base class, a decorator, or a value that shows what it was made of."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        super().__init__(*values, *fields.values())

    def __call__(self, decorated: Any) -> Any:
        return decorated


class Framework(ModuleType):
    """A module of a framework that is not installed."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})


MODULES = """
harbor harbor.environments harbor.environments.base harbor.environments.capabilities harbor.models harbor.models.trial
harbor.models.trial.paths minisweagent minisweagent.exceptions minisweagent.utils minisweagent.utils.serialize nemo_gym nemo_gym.sandbox
nemo_gym.sandbox.providers nemo_gym.sandbox.providers.base uni_agent uni_agent.sandbox uni_agent.sandbox.base uni_agent.sandbox.registry
verl verl.experimental verl.experimental.agent_loop verl.experimental.agent_loop.agent_loop
verl.experimental.agent_loop.tool_agent_loop verl.tools verl.tools.base_tool verl.tools.schemas verl.tools.function_tool
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return what imports a class's module, which is forgotten afterwards where its framework was stood in for."""
    missing = [name for name in MODULES.split() if find_spec(name.partition(".")[0]) is None]

    def imported(name: str) -> ModuleType:
        for module in missing:
            monkeypatch.setitem(sys.modules, module, Framework(module))
        for module in ("verl", "verl_functions", name) if missing else ():
            monkeypatch.delitem(sys.modules, f"tangram.integrations.{module}", raising=False)
        return importlib.import_module(f"tangram.integrations.{name}")

    yield imported
    for name in [name for name in sys.modules if name.startswith("tangram.integrations.")] if missing else ():
        if name.rpartition(".")[2] in ("harbor", "mini_swe_agent", "nemo_gym", "uni_agent", "verl", "verl_functions"):
            del sys.modules[name]


class Answering:
    """A sandbox whose commands all end in one way."""

    asked: ClassVar[dict[str, Any]] = {}
    """How the last command of any was to be carried out."""

    def __init__(self, done: ExecResult) -> None:
        self._done = done

    async def exec(self, *_: Any, **how: Any) -> ExecResult:
        Answering.asked = how
        return self._done

    exec_in_session = write_file = close = exec


async def harbor(module: Any, done: ExecResult) -> Any:
    me = SimpleNamespace(_resolve_user=lambda user: user, _merge_env=dict, _workdir="/", _units=(1,), _opened=Answering(done))
    return await module.TangramEnvironment.exec(me, "any", env={})


async def nemo_gym(module: Any, done: ExecResult) -> Any:
    return await module.TangramProvider().exec(SimpleNamespace(raw=module._Opened(Answering(done), (1,))), "any")


async def uni_agent(module: Any, done: ExecResult) -> Any:
    return await module.TangramSandbox._exec(SimpleNamespace(_opened=Answering(done), _units=(1,)), ["sh", "-c", "any"])


async def uni_agent_shell(module: Any, done: ExecResult) -> Any:
    return await module.TangramShell(SimpleNamespace(_opened=Answering(done), _units=(1,)), "s").run("any")


async def verl(module: Any, done: ExecResult) -> Any:
    return module._text(done)


async def verl_functions(module: Any, done: ExecResult) -> Any:
    async def opened(*_: Any, **__: Any) -> Answering:
        return Answering(done)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sandbox, "open", opened)
        patched.setattr(module, "borrow_client", lambda job: None)
        return await module.run_python("any")


async def mini_swe_agent(module: Any, done: ExecResult | ActionError, *chunks: Chunk) -> Any:
    handle = SimpleNamespace(output=lambda: iter(chunks), result=lambda: ended(done), cancel=lambda: None)
    environment = SimpleNamespace(submit=lambda *_, **how: handle if how["stream"] else None)
    me = SimpleNamespace(config=module.TangramEnvironmentConfig(), _environment=environment)
    return module.TangramEnvironment.execute(me, {"command": "any"})


CLASSES = {
    "harbor": harbor,
    "nemo_gym": nemo_gym,
    "uni_agent": uni_agent,
    "uni_agent_shell": uni_agent_shell,
    "verl": verl,
    "verl_functions": verl_functions,
    "mini_swe_agent": mini_swe_agent,
}


@pytest.mark.parametrize("name", CLASSES)
async def test_a_class_says_that_output_is_left_out_and_names_the_limit_that_has_ended_a_command(
    load: Callable[[str], ModuleType], name: str
) -> None:
    module, ask = load(name.removesuffix("_shell")), CLASSES[name]
    told = [str(await ask(module, result("printed", truncated=truncated))) for truncated in (True, False)]
    assert [LEFT_OUT in text for text in told] == [True, False] and all("printed" in text for text in told), told
    done = result("", truncated=False, exit_code=137, reason="the kernel has ended it: its memory was full")
    assert "its memory was full" in str(await ask(module, done))
    # And those whose output may be a submission ask for all of it
    assert name in ("verl", "verl_functions", "mini_swe_agent") or Answering.asked["whole"]


async def test_a_submission_is_made_of_what_was_printed_or_is_an_error(load: Callable[[str], ModuleType]) -> None:
    module, cut = load("mini_swe_agent"), result(f" {FINISHED}\nab[...]d\n", truncated=True)
    # Given a submission that is longer than results are; then it has all that was printed
    parts = (Chunk("stdout", f" {FINISHED}\nab".encode(), "3"), Chunk("stdout", b"cd\n", "6"))
    with pytest.raises(module.Submitted) as submitted:
        await mini_swe_agent(module, cut, *parts)
    assert submitted.value.args[0]["extra"]["submission"] == "abcd\n"
    # When something of it is missing; then it is an error, and an observation is what is left
    for missing in (Chunk("stdout", b"", "8", dropped=2), Chunk("stdout", b"x" * (sandbox.MOST_PRINTED_BYTES + 1), "9")):
        with pytest.raises(SubmissionCut, match="not whole"):
            await mini_swe_agent(module, cut, *parts, missing)
        assert "seen[...]" in str(await mini_swe_agent(module, result("seen[...]", truncated=True), missing))


ENDED = {
    "its disk": ActionFailed("its disk is full", "disk_limit"),
    "its memory": EnvironmentLost("its memory was full", "n", "out_of_memory"),
    "its shells": ActionFailed("no shell comes to the command", "exit"),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("error", ENDED.values(), ids=ENDED)
async def test_a_command_that_programs_have_brought_to_nothing_is_a_result(
    load: Callable[[str], ModuleType], error: ActionError, whole: bool
) -> None:
    opened = Sandbox(Printing(error), Place("j", "t", "e"))  # type: ignore[arg-type]
    for done in (await opened.exec("any", whole=whole), await opened.exec_in_session("any", whole=whole)):
        assert (done.exit_code, done.reason, done.fault) == (137, str(error), "program")
    seen = await mini_swe_agent(load("mini_swe_agent"), error)
    assert seen["returncode"] == 137 and str(error) in seen["output"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(ENDED["its disk"], 137, "its disk is full"), (ActionFailed("it broke", "sandbox_failed"), 125, "exec failed: it broke")],
)
def test_a_command_line_tells_what_programs_and_what_the_stack_brought_to_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: ActionError, code: int, line: str
) -> None:
    monkeypatch.setattr(docker_cli, "AsyncClient", lambda job: contextlib.nullcontext(Printing(error)))
    monkeypatch.setattr(sys, "argv", ["tangram-docker", "exec", "env-1", "true"])
    with pytest.raises(SystemExit) as ended:
        docker_cli.main()
    assert (ended.value.code, capfd.readouterr().err) == (code, f"tangram-docker: {line}\n")


@pytest.mark.parametrize("error", [ActionFailed("it broke", "sandbox_failed"), EnvironmentLost("a node died", "n")])
async def test_a_command_that_the_stack_has_brought_to_nothing_is_none(load: Callable[[str], ModuleType], error: ActionError) -> None:
    opened, module = Sandbox(Printing(error), Place("j", "t", "e")), load("mini_swe_agent")  # type: ignore[arg-type]
    for ask in (opened.exec("any", whole=True), opened.exec("any"), opened.exec_in_session("any"), mini_swe_agent(module, error)):
        with pytest.raises(type(error), match=str(error)):
            await ask


@pytest.mark.parametrize("code", [-1, 127])
@pytest.mark.parametrize("error", ENDED.values(), ids=ENDED)
async def test_a_check_that_a_solution_has_brought_to_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch, error: ActionError, code: int
) -> None:
    # Also where it ends with 127 before that, so that it is looked whether its program is there
    before = [result("", truncated=False, exit_code=code)] if code == 127 else []

    class Filling(Answering):
        async def exec(self, *_: Any, **how: Any) -> ExecResult:
            return before.pop() if before else sandbox.ended_by_program(error)

    async def opened(*_: Any, **__: Any) -> Answering:
        return Filling(result("", truncated=False))

    monkeypatch.setattr(Sandbox, "open", opened)
    monkeypatch.setattr(verl_reward, "borrow_client", lambda job: None)
    monkeypatch.setattr(verl_reward, "return_client", lambda client: asyncio.sleep(0))
    assert await verl_reward.compute_score("sums", "any", "any") == {"score": 0.0, "exit_code": code}


class Printing:
    """A client whose command ends in one way, and whose output can be read."""

    job = "any"

    def __init__(self, done: ExecResult | ActionError, *chunks: Chunk) -> None:
        self._done, self._chunks = done, chunks

    async def submit(self, action: Action) -> Printing:
        return self

    async def output(self) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            yield chunk

    def __await__(self) -> Generator[Any, None, ExecResult]:
        return self._end().__await__()

    async def _end(self) -> ExecResult:
        return ended(self._done)


def ended(done: ExecResult | ActionError) -> ExecResult:
    """Return the result of a command, or raise how it has ended without one."""
    if isinstance(done, ActionError):
        raise done
    return done


async def ask_whole(done: ExecResult, *chunks: Chunk) -> ExecResult:
    return await Sandbox(Printing(done, *chunks), Place("j", "t", "e")).exec("any", whole=True)  # type: ignore[arg-type]


async def test_output_beyond_what_results_hold_is_whole_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_PRINTED_BYTES", 9)
    cut, parts = (
        result("a[...]d", truncated=True),
        (Chunk("stdout", b"ab\xc3", "3"), Chunk("stderr", b"e", "4"), Chunk("stdout", b"\xa9d", "6")),
    )
    # Given a result of which something is left out; then it is made of what was printed
    done = await ask_whole(cut, *parts)
    assert (done.stdout, done.stderr, done.remark) == ("abéd", "e", "")
    # When too much was printed, or something is missing; then it is an error, unless a limit has ended the command
    for more in (Chunk("stdout", b"too long", "14"), Chunk("stdout", b"", "8", dropped=2)):
        with pytest.raises(SubmissionCut, match="the output is not whole"):
            await ask_whole(cut, *parts, more)
        ended = replace(cut, status="timed_out", exit_code=None)
        assert await ask_whole(ended, *parts, more) == ended
