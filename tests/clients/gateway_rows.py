"""Rows of the clients that speak to the gateway: E2B, SWE-ReX, SandboxFusion, scores and teachers, ROCK."""

from __future__ import annotations

from collections.abc import Iterator

from tests.clients.environments import ENVIRONMENTS
from tests.clients.rows import Row, node, said
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

_REX, _REX_FILES, _ROCK, _CODE, _SCORES = (
    "gateway/test_gateway_swerex",
    "gateway/test_gateway_swerex_files",
    "gateway/test_gateway_rock",
    "gateway/test_gateway_run_code",
    "gateway/test_gateway_scores",
)

REX_TESTS: dict[str, tuple[str, ...]] = {
    "is_alive": node(_REX, "test_is_alive_answers_beside_a_command_and_without_an_action"),
    "create_session": node(
        _REX,
        "test_sessions_are_created_and_closed_by_name",
        "test_a_session_reads_its_startup_files",
        "test_a_session_whose_startup_takes_too_long_is_not_there",
    ),
    "run_in_session": node(
        _REX,
        "test_a_session_keeps_its_state_and_has_both_streams_in_order",
        "test_check_says_what_an_exit_code_is_for",
        "test_a_command_that_ends_its_shell_leaves_the_session_usable",
        "test_a_command_beyond_its_timeout_is_ended_and_the_session_goes_on",
    ),
    "run_in_session (interrupt)": node(_REX, "test_an_interrupt_ends_the_running_command"),
    "run_in_session (interactive)": node("gateway/test_gateway_swerex_interactive", "test_an_interpreter_is_led_line_by_line"),
    "run_in_session (expect)": node(
        "gateway/test_gateway_swerex_interactive", "test_the_first_pattern_that_comes_is_named_and_the_rest_waits"
    ),
    "close_session": node(_REX, "test_sessions_are_created_and_closed_by_name"),
    "execute": node(
        _REX,
        "test_execute_has_the_meanings_of_subprocess_run",
        "test_execute_checks",
        "test_programs_run_beside_each_other_and_beside_shells",
    ),
    "read_file": node(_REX_FILES, "test_files_are_read_as_python_reads_them", "test_a_file_that_cannot_be_used_is_pythons_error"),
    "write_file": node(_REX_FILES, "test_files_are_read_as_python_reads_them", "test_a_file_that_cannot_be_used_is_pythons_error"),
    "upload": node(_REX_FILES, "test_a_file_of_any_size_is_uploaded_whole", "test_a_folder_is_uploaded_with_what_is_in_it"),
    "close": node(_REX, "test_an_environment_that_was_opened_otherwise_is_served_by_its_id"),
}

ROCK_TESTS: dict[str, tuple[str, ...]] = {
    "start": node(
        _ROCK, "test_a_sandbox_that_was_started_stands_and_says_what_it_is", "test_a_sandbox_that_can_never_be_is_refused[start0]"
    ),
    "is_alive, get_status": node(
        _ROCK, "test_a_sandbox_that_was_started_stands_and_says_what_it_is", "test_a_sandbox_that_was_stopped_is_gone"
    ),
    "create_session": node(_ROCK, "test_commands_run_in_a_session_and_beside", "test_what_fails_is_a_failure_and_no_result"),
    "arun": node(_ROCK, "test_commands_run_in_a_session_and_beside"),
    "execute": node(_ROCK, "test_commands_run_in_a_session_and_beside"),
    "read_file, write_file, upload": node(_ROCK, "test_files_go_in_and_come_out"),
    "close_session, stop, delete, close": node(_ROCK, "test_a_sandbox_that_was_stopped_is_gone"),
    "restart, archive, commit": node(_ROCK, "test_what_rock_has_and_we_have_not_is_not_found"),
}

FUSION = (
    ("run_code", "works", ("test_code_runs_with_its_input_and_its_files", "test_code_that_fails_is_failed_and_no_error")),
    ("run_code (compiled)", "works; compilers are those of the image", ("test_a_compiled_language_has_a_result_of_its_compiler",)),
    ("run_code_async", "works", ("test_the_async_client_is_served_alike",)),
    ("summary_run_code_result", "works", ("test_code_that_fails_is_failed_and_no_error",)),
    ("run_code (run_timeout)", "works", ("test_code_that_runs_for_too_long_is_over_its_limit_with_what_it_printed",)),
    (
        "run_code (memory_limit_MB)",
        "differs: limits what each process may map, and books as much on the node",
        ("test_a_memory_limit_holds",),
    ),
    ("run_code (no such tool)", "differs: SandboxError where the image lacks the language", ("test_a_tool_that_is_missing_is_no_verdict",)),
    (
        "run_code (full queue)",
        "works; 504 in time, and the retry gets the same run",
        ("test_a_call_that_waits_in_the_queue_is_504_in_time_and_its_retry_gets_the_same_run",),
    ),
    ("run_jupyter", "differs: plain Python without magics where the image has no IPython", ("test_cells_share_one_interpreter",)),
    ("run_jupyter (cell_timeout)", "works", ("test_a_cell_that_runs_for_too_long_ends_the_notebook_with_what_there_is",)),
)


def rows() -> Iterator[Row]:
    """Yield the rows."""
    for one in e2b_methods.METHODS:
        yield Row(
            client=one.client,
            version=one.version,
            method=one.method,
            **said(one.how),
            tests=node("gateway/test_gateway_e2b_methods", f"test_row[{one.method}]"),
        )
    for table, tests in ((REX, REX_TESTS), (ROCK, ROCK_TESTS)):
        for client, version, method, how in table:
            yield Row(client=client, version=version, method=method, **said(how), tests=tests[method])
    for method, how, names in FUSION:
        yield Row(client="sandbox-fusion", version="0.3.7", method=method, **said(how), tests=node(_CODE, *names))
    yield Row(
        client="sandbox-fusion",
        version="0.3.7",
        method="get_prompts, submit, list_datasets",
        **said("not served: data sets and their scoring are the caller's"),
        tests=node("gateway/test_gateway_not_served", "test_data_sets_of_sandbox_fusion_are_not_found"),
    )
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
