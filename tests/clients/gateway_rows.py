"""Rows of the clients that speak to the gateway: E2B, SWE-ReX, SandboxFusion, scores and teachers, ROCK."""

from __future__ import annotations

from collections.abc import Iterator

from tests.clients.e2b_git import CHECKS
from tests.clients.environments import ENVIRONMENTS
from tests.clients.rows import Row, Table, node, said
from tests.gateway import e2b_methods, score_methods
from tests.gateway.test_gateway_rock import MATRIX as ROCK
from tests.gateway.test_gateway_swerex import MATRIX as REX

REAL_TRL = {
    "VLLMClient.check_server",
    "VLLMClient.__init__: /v1/models",
    "VLLMClient.get_sequence_logprobs(top_logprobs=1)",
    "VLLMClient.get_sequence_logprobs(top_logprobs=8)",
    "VLLMClient.get_sequence_logprobs(top_logprobs=129)",
    "async_distillation._score_with_teacher(teacher_top_k=1)",
    "async_distillation._score_with_teacher(teacher_top_k=8)",
}
"""What TRL's own client is made to call; the rest of its rows are requests as it sends them."""

FUSION: Table = (
    ("run_code", "works", "test_code_runs_with_its_input_and_its_files", "test_code_that_fails_is_failed_and_no_error"),
    ("run_code (compiled)", "works; compilers are those of the image", "test_a_compiled_language_has_a_result_of_its_compiler"),
    ("run_code_async", "works", "test_the_async_client_is_served_alike"),
    ("summary_run_code_result", "works", "test_code_that_fails_is_failed_and_no_error"),
    ("run_code (run_timeout)", "works", "test_code_that_runs_for_too_long_is_over_its_limit_with_what_it_printed"),
    ("run_code (memory_limit_MB)", "differs: limits what each process may map, and books as much on the node", "test_a_memory_limit_holds"),
    ("run_code (no such tool)", "differs: SandboxError where the image lacks the language", "test_a_tool_that_is_missing_is_no_verdict"),
    (
        "run_code (full queue)",
        "works; 504 in time, and the retry gets the same run",
        "test_a_call_that_waits_in_the_queue_is_504_in_time_and_its_retry_gets_the_same_run",
    ),
    ("run_jupyter", "differs: plain Python without magics where the image has no IPython", "test_cells_share_one_interpreter"),
    ("run_jupyter (cell_timeout)", "works", "test_a_cell_that_runs_for_too_long_ends_the_notebook_with_what_there_is"),
    (
        "get_prompts, submit, list_datasets",
        "not served: data sets and their scoring are the caller's",
        "gateway/test_gateway_not_served.py::test_data_sets_of_sandbox_fusion_are_not_found",
    ),
)
_SCORES = "gateway/test_gateway_scores"


def rows() -> Iterator[Row]:
    """Yield the rows."""
    for method in CHECKS:
        shown = node("gateway/test_gateway_e2b_methods", f"test_row[{method}]")
        yield Row(client="e2b", version=e2b_methods.VERSION, method=method, **said(e2b_methods.how(method)), tests=shown)
    for client, version, file, table in (
        ("swe-rex", "1.4.0", "gateway/test_gateway_swerex", REX),
        ("rl-rock", "1.11.0", "gateway/test_gateway_rock", ROCK),
        ("sandbox-fusion", "0.3.7", "gateway/test_gateway_run_code", FUSION),
    ):
        for method, how, *tests in table:
            yield Row(client=client, version=version, method=method, **said(how), tests=node(file, *tests))
    for call in score_methods.METHODS:
        if call.client == "trl" and call.method in REAL_TRL:
            yield Row(
                client="trl",
                version=ENVIRONMENTS["training"].version("trl"),
                method=call.method,
                **said(call.how),
                environment="training",
                tests=node(_SCORES, "test_trls_own_client_reads_a_teacher"),
            )
            continue
        shown = (
            node(_SCORES, f"test_recorded_requests_are_answered_as_their_client_reads_it[{call.name}]")
            if call.path
            else node("gateway/test_gateway_not_served", f"test_a_path_that_is_not_served_is_not_found[{call.name}]")
        )
        yield Row(client=call.client, version=call.version, method=call.method, **said(call.how), tests=shown)
