"""SandboxFusion's shape: `/run_code`, `/run_jupyter`, `/v1/ping`.

Each call has an environment of its own, which is opened with the call's files. A command compiles where the language needs that. Another
one runs the code, and files are fetched. The caller does not wait for the environment to close. The first command is submitted together
with the opening, so that an interpreted language costs one wait.

| what happens | the answer |
|---|---|
| the code ends with 0 | `Success`, `Finished` |
| the code or its compiler ends otherwise | `Failed`, `Finished` |
| a time limit is over | `Failed`, `TimeLimitExceeded` |
| the image lacks the language's tool | `SandboxError`: no verdict, and coming again would not help |
| a failure of the system, a full queue | 504: the callers try again, with a new run |
| no result within the time limits and `TANGRAM_GATEWAY_PATIENCE_S` | 504: the same body, sent again, waits for the same run |
| a body that is wrong | 422 |
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError, field_validator
from starlette.requests import Request

from app.gateway import calls
from app.gateway.context import CallerOf, Gateway, GatewayOf
from app.gateway.errors import BadRequest, GatewayError, InfraFailed, Overloaded, ProgramFailed, StillRunning
from app.gateway.joined import ABANDONED_S
from app.gateway.languages import Language, is_inside
from app.gateway.records import Record
from app.gateway.sessions import Caller, digest
from app.gateway.shape import counted, shape_router
from tangram import calls as words
from tangram.action import LONGEST_S, Action
from tangram.errors import TangramError
from tangram.handles import Handle
from tangram.results import LEFT_OUT, ExecResult
from tangram.wire import MEMORY_ENFORCED

MARGIN_S = 30.0
"""Seconds by which the lease of a call's environment is longer than anybody may wait for the call, from when the environment stands."""

STACK_MB = 1024
"""The size of a stack where a call names no memory limit."""

STDIN = ".stdin"
# The notebook has a folder of its own: Python looks for modules there first, and files of callers may be named as modules, "code" for one.
NOTEBOOK, CELLS, CELL_RESULTS = ".notebook/run.py", ".cells.json", ".results.jsonl"
_NOTEBOOK_SOURCE = Path(__file__).with_name("notebook.py")
_NO_SUCH_COMMAND = 127
_SHAPE = "run_code"

Outcome = Literal["Finished", "Error", "TimeLimitExceeded"]
Verdict = Literal["Success", "Failed", "SandboxError"]


def _answer_error(_request: Request, error: GatewayError) -> Response:
    """Answer 504 to what is to be sent again, which is all that some callers retry."""
    status = 504 if isinstance(error, (InfraFailed, Overloaded, StillRunning)) else 422 if isinstance(error, BadRequest) else error.status
    return JSONResponse({"detail": str(error)}, status, dict(error.headers))


router = shape_router(_SHAPE, _answer_error, keep_422=True, tags=["SandboxFusion"])


_Name = Annotated[str, Field(min_length=1)]
"""A file's name: with its length, pydantic checks that it has a form in UTF-8."""


class _Files(BaseModel):
    """What both kinds of calls have: files that go in, base64 by path, and paths of files that come out."""

    files: dict[_Name, str | None] = {}
    fetch_files: list[_Name] = []

    @field_validator("files")
    @classmethod
    def _are_base64(cls, files: dict[str, str | None]) -> dict[str, str | None]:
        for path, content in files.items():
            _check_inside(path)
            try:
                base64.b64decode(content or "", validate=True)
            except (binascii.Error, ValueError):
                raise ValueError(f"{path}: its content is not base64") from None
        return files

    @field_validator("fetch_files")
    @classmethod
    def _are_inside(cls, paths: list[str]) -> list[str]:
        for path in paths:
            _check_inside(path)
        return paths

    @property
    def given(self) -> dict[str, str]:
        return {path: content for path, content in self.files.items() if content is not None}


class RunCodeBody(_Files):
    """Code and its limits, seconds; a memory limit of 0 or less is none."""

    code: str
    language: str
    stdin: str | None = None
    compile_timeout: float = Field(10, gt=0, le=LONGEST_S)
    run_timeout: float = Field(10, gt=0, le=LONGEST_S)
    memory_limit_MB: int = -1


class RunJupyterBody(_Files):
    """Cells of a notebook and their limits, seconds; a cell timeout of 0 is none."""

    cells: list[str]
    cell_timeout: float = Field(0, ge=0, le=LONGEST_S)
    total_timeout: float = Field(45, gt=0, le=LONGEST_S)
    kernel: Literal["python3"] = "python3"


class CommandResult(BaseModel):
    """How a command ended; times are seconds."""

    status: Outcome
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    @classmethod
    def of(cls, result: ExecResult) -> CommandResult:
        """Return the result of an action in these words."""
        return cls(
            status="TimeLimitExceeded" if result.status == "timed_out" else "Finished",
            execution_time=result.act.execution_s,
            return_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
        )

    @property
    def succeeded(self) -> bool:
        """Whether it ended with 0."""
        return self.status == "Finished" and self.return_code == 0


class RunCodeAnswer(BaseModel):
    """What became of the code."""

    status: Verdict
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class CellResult(BaseModel):
    """What a cell printed, showed and raised."""

    stdout: str
    stderr: str
    display: list[dict[str, Any]]
    error: list[dict[str, Any]]


class _Kept(CellResult):
    """A line of the file of results; what is beyond the limit on output was `dropped`."""

    dropped: bool = False


class RunJupyterAnswer(BaseModel):
    """What became of the cells; `driver` is the process that ran them."""

    status: Verdict
    message: str = ""
    driver: CommandResult | None = None
    cells: list[CellResult] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


@router.get("/v1/ping")
@router.head("/v1/ping", include_in_schema=False)
async def ping() -> str:
    """Say that the process answers; needs no token."""
    return "pong"


@router.post("/run_code", response_model=RunCodeAnswer)
async def run_code(body: RunCodeBody, caller: CallerOf, gateway: GatewayOf, request: Request) -> Response:
    """Run code once, in an environment of its own."""
    language = gateway.languages.get(body.language)
    if language is None:
        raise BadRequest(f"language: {body.language!r} is none of {', '.join(sorted(gateway.languages))}")
    limits_s = body.run_timeout + (body.compile_timeout if language.compile else 0.0)

    async def begin() -> str:
        try:
            answer = await _Once(gateway, caller, body, limits_s).run_code(body, language)
        except ProgramFailed as error:
            answer = RunCodeAnswer(status="Failed", message=str(error), run_result=CommandResult(status="Error", stderr=str(error)))
        if answer.status == "SandboxError":
            counted(request, _SHAPE, InfraFailed(answer.message, "missing_tool"))
        return answer.model_dump_json()

    return await _joined(gateway, caller, body, body.compile_timeout + body.run_timeout, begin, request)


@router.post("/run_jupyter", response_model=RunJupyterAnswer)
async def run_jupyter(body: RunJupyterBody, caller: CallerOf, gateway: GatewayOf, request: Request) -> Response:
    """Run the cells of a notebook in order, in an environment of their own; a cell that fails does not stop those after it."""

    async def begin() -> str:
        try:
            answer = await _Once(gateway, caller, body, body.total_timeout).run_jupyter(body)
        except ProgramFailed as error:
            answer = RunJupyterAnswer(status="Failed", message=str(error), driver=CommandResult(status="Error", stderr=str(error)))
        return answer.model_dump_json()

    return await _joined(gateway, caller, body, body.total_timeout, begin, request)


async def _joined(
    gateway: Gateway, caller: Caller, body: BaseModel, limits_s: float, begin: Callable[[], Any], request: Request
) -> Response:
    """Answer with the run of this very body that an earlier call has left behind, else with a new one."""
    asked = digest(caller.job, request.url.path, body.model_dump_json())
    answer = await gateway.runs.answer(asked, begin, limits_s + gateway.settings.gateway_patience_s, request)
    return Response(answer, media_type="application/json")


class _Once:
    """One call's environment, and what is done in it."""

    def __init__(self, gateway: Gateway, caller: Caller, body: _Files, limits_s: float) -> None:
        self._gateway, self._caller, self._body = gateway, caller, body
        self._remarks: list[str] = []
        """What is to be said of commands that the kernel has ended, and of output that is left out."""
        self._lease_s = min(limits_s + gateway.settings.gateway_patience_s + ABANDONED_S + MARGIN_S, LONGEST_S)
        self._keeping: asyncio.Task[None] | None = None

    async def run_code(self, body: RunCodeBody, language: Language) -> RunCodeAnswer:
        """Compile, where that is needed, and run."""
        files = {**body.given, language.file: _base64(language.source(body.code))}
        if body.stdin is not None:
            files[STDIN] = _base64(body.stdin)
        memory_mb = body.memory_limit_MB if body.memory_limit_MB > 0 else None
        stdin = STDIN if body.stdin is not None else "/dev/null"
        run = _limited(language.run, stdin, memory_mb)
        first, first_s = run, body.run_timeout
        if language.compile is not None:
            first, first_s = _limited(language.compile, "/dev/null", memory_mb), body.compile_timeout
        record, opening = await self._begin(files, language.image, memory_mb)
        try:
            result = await self._first(record, opening, first, first_s, body.language)
            if result.return_code == _NO_SUCH_COMMAND and not await self._has(record, language.tool):
                where = f"image {language.image}" if language.image else "the image of the node"
                message = f"language {body.language} needs {language.tool}, which {where} does not have"
                return RunCodeAnswer(status="SandboxError", message=message, executor_pod_name=record.id)
            compiled = result if language.compile else None
            ran = None if compiled else result
            if compiled is not None and compiled.succeeded:
                ran = await self._command(record, run, body.run_timeout, body.language)
            fetched, message = await self._fetch(record)
        finally:
            self._end(record)
        return RunCodeAnswer(
            status="Success" if ran is not None and ran.succeeded else "Failed",
            message=message,
            compile_result=compiled,
            run_result=ran,
            executor_pod_name=record.id,
            files=fetched,
        )

    async def run_jupyter(self, body: RunJupyterBody) -> RunJupyterAnswer:
        """Run cells one after another in one interpreter."""
        source = await asyncio.to_thread(_NOTEBOOK_SOURCE.read_text, encoding="utf-8")
        files = {**body.given, NOTEBOOK: _base64(source), CELLS: _base64(json.dumps(body.cells))}
        record, opening = await self._begin(files, None, None)
        try:
            most = self._gateway.settings.output_limit_bytes
            line = f"python3 {NOTEBOOK} {CELLS} {CELL_RESULTS} {body.cell_timeout:g} {most}"
            driver = await self._first(record, opening, _limited(line, "/dev/null", None), body.total_timeout, "jupyter")
            if driver.return_code == _NO_SUCH_COMMAND and not await self._has(record, "python3"):
                return RunJupyterAnswer(status="SandboxError", message="the image of the node has no python3", executor_pod_name=record.id)
            cells = await self._cells(record, driver, len(body.cells))
            fetched, message = await self._fetch(record)
        finally:
            self._end(record)
        return RunJupyterAnswer(
            status="Success" if driver.succeeded and len(cells) == len(body.cells) and not any(cell.error for cell in cells) else "Failed",
            message=message,
            driver=driver,
            cells=cells,
            executor_pod_name=record.id,
            files=fetched,
        )

    async def _begin(self, files: dict[str, str], image: str | None, memory_mb: int | None) -> tuple[Record, Handle[Any]]:
        return await self._gateway.environments.begin(self._caller, files=files, image=image, memory_mb=memory_mb, lease_s=self._lease_s)

    async def _first(self, record: Record, opening: Handle[Any], command: str, timeout_s: float, language: str) -> CommandResult:
        """Run a command that is submitted before its environment stands; a failure of the opening is what is raised."""
        handle = calls.submit(self._caller, _exec(record, command, timeout_s, language))
        await calls.wait(opening)
        self._keeping = asyncio.create_task(self._keep(record))
        return self._result(await calls.wait(handle))

    async def _keep(self, record: Record) -> None:
        """Renew the lease as long as this process lives and the call goes on: its commands may wait in the queue for any time."""
        while True:
            await asyncio.sleep(self._lease_s / 2)
            with suppress(TangramError):  # without the broker, the next one is in time
                await asyncio.wrap_future(self._caller.session.renew_lease(record.place, self._lease_s).sent)

    def _end(self, record: Record) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._gateway.environments.end(self._caller, record)

    async def _command(self, record: Record, command: str, timeout_s: float, language: str) -> CommandResult:
        return self._result(await calls.run(self._caller, _exec(record, command, timeout_s, language)))

    def _result(self, result: ExecResult) -> CommandResult:
        if result.cause == "out_of_memory":
            self._remarks.append(result.reason)
        if result.truncated:
            self._remarks.append(LEFT_OUT)
        return CommandResult.of(result)

    async def _has(self, record: Record, tool: str) -> bool:
        return (await self._command(record, f"command -v {tool}", 10.0, "tool")).succeeded

    async def _fetch(self, record: Record) -> tuple[dict[str, str], str]:
        """Return the files that are asked for, base64 by path, and what is to be said of commands, and of files that could not be had."""
        fetched, problems = {}, []
        for path in self._body.fetch_files:
            try:
                data: bytes = await calls.run(self._caller, words.read_file(record.place, path))
                fetched[path] = base64.b64encode(data).decode()
            except BadRequest as error:
                problems.append(f"{path} was not fetched: {error}")
        return fetched, "; ".join((*self._remarks, *problems))

    async def _cells(self, record: Record, driver: CommandResult, number: int) -> list[CellResult]:
        """Return the results of the cells that have ended; remark on those of the `number` that there should be and are not."""
        try:
            lines: bytes = await calls.run(self._caller, words.read_file(record.place, CELL_RESULTS))
        except BadRequest as error:
            self._remarks.append(f"the results of the cells cannot be read: {error}")
            return []
        cells = [cell for line in lines.splitlines() if (cell := _cell(line)) is not None]
        if len(cells) != number:
            end = "was out of time" if driver.return_code is None else f"ended with {driver.return_code}"
            self._remarks.append(f"{len(cells)} of {number} cells have a result: the interpreter {end}")
        if dropped := [str(place) for place, cell in enumerate(cells, 1) if cell.dropped]:
            self._remarks.append(f"output of cells was dropped, being too long: {', '.join(dropped)}")
        return list(cells)


def _cell(line: bytes) -> _Kept | None:
    """Return a result; None for a line that is none, since a cell can write into the file, too."""
    try:
        return _Kept.model_validate_json(line)
    except ValidationError:
        return None


def _exec(record: Record, command: str, timeout_s: float, language: str) -> Action:
    return words.execute(record.place, command, timeout_s=timeout_s, action_class=f"{_SHAPE}.{language}")


def _limited(line: str, stdin: str, memory_mb: int | None) -> str:
    """Return a command line with its own standard input and a stack of the size of its memory, of which no shell says how it has ended.

    Where the kernel does not hold it to its memory, what it may map is limited. That is less than it may use: programs such as Java map
    much that they do not use. A stack then has no limit of its own, as threads would map as much each. They have 2 MiB.
    """
    stack = 'ulimit -S -s {} 2>/dev/null || ulimit -S -s "$(ulimit -H -s)"'
    limit = stack.format((memory_mb or STACK_MB) * 1024)
    if memory_mb is not None:
        limit = f'if test -n "${MEMORY_ENFORCED}"; then {limit}; else {stack.format("unlimited")}; ulimit -S -v {memory_mb * 1024}; fi'
    # A shell prints "Segmentation fault" of a process of its own. This one does so to /dev/null.
    return f"{{ ( {limit}; {line}\n) < {stdin} 2>&3 3>&-; }} 3>&2 2>/dev/null"


def _base64(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _check_inside(path: str) -> None:
    if not is_inside(path):
        raise ValueError(f"{path!r} does not lead into the work folder")
