"""Rows of frameworks that run on a stack by a class of ours, or by a program of ours, and of those that use E2B's client themselves."""

from __future__ import annotations

from collections.abc import Iterator

from tests.clients import javascript_rows
from tests.clients.environments import ENVIRONMENTS
from tests.clients.rows import Row, Table, node, said

MINI_SWE_AGENT: Table = (
    ("TangramEnvironment: a bug fixed by its agent", "works", "test_the_class_fixes_a_bug_and_leaves_no_environment"),
    (
        "DockerEnvironment by MSWEA_DOCKER_EXECUTABLE=tangram-docker: the same bug",
        "works",
        "test_its_docker_environment_fixes_the_same_bug_by_tangram_docker",
    ),
    (
        "Environment.execute",
        "works",
        "test_nothing_of_a_command_but_its_files_is_left_to_the_next",
        "test_both_streams_are_one_in_the_order_of_writing",
    ),
    ("Environment.execute (timeout)", "works", "test_a_command_that_takes_too_long_is_an_observation_with_what_it_printed"),
    ("config: env, forward_env", "works", "test_variables_are_those_of_the_configuration_and_those_forwarded"),
    (
        "a failure of the stack, by the class",
        "works; it ends the agent with its name and no submission",
        "test_an_environment_that_is_gone_ends_the_agent_without_a_submission",
    ),
    (
        "config: image",
        "differs: where no node has containers an image is a label, and a warning says so",
        "test_an_image_is_a_label_where_no_node_has_containers",
    ),
)
HARBOR: Table = (
    (
        "harbor run --agent oracle --env tangram.integrations.harbor:TangramEnvironment",
        "works",
        "test_the_oracle_solves_a_task_and_no_environment_is_left",
    ),
    (
        "the same with --ek isolation=bubblewrap",
        "works; for tasks that need no image",
        "test_the_oracle_solves_a_task_without_an_image_in_a_process_sandbox",
    ),
    (
        "harbor run --agent oracle --env e2b (its own environment)",
        "works",
        "clients/test_e2b_containers.py::test_harbors_own_e2b_environment_has_a_task_solved_by_its_oracle",
    ),
    (
        "an image that does not let Harbor's folders be made",
        "differs: commands do not run as root, so this is an exception of the trial and no reward",
        "test_an_image_without_harbors_folders_is_an_exception_without_a_reward",
    ),
)
VERIFIERS: Table = (
    ("E2BRuntime: start, alive, stop", "works", "test_it_starts_in_its_template_and_leaves_nothing"),
    ("E2BRuntime.run", "works", "test_commands_have_their_folder_variables_and_exit_code"),
    ("E2BRuntime.read, write", "works", "test_files_go_in_and_come_out"),
    (
        "E2BRuntime.run_program (containers)",
        "works",
        "clients/test_e2b_containers.py::test_the_main_program_of_a_rollout_runs_once_to_its_end",
    ),
    ("E2BRuntime.run_program (process sandboxes)", "works", "test_the_main_program_of_a_rollout_runs_once_to_its_end"),
    ("E2BRuntime.open_process", "works", "test_a_live_process_is_written_to_and_read_from"),
    ("RuntimeProcess.terminate, kill", "works", "test_a_live_process_is_terminated_and_killed"),
    ("E2BRuntime.run_background", "works", "test_a_background_process_goes_on_and_can_be_asked"),
    (
        "E2BRuntime.prepare_execution (network policy)",
        "differs: noted in the log, without effect",
        "test_a_network_policy_is_taken_note_of",
    ),
    (
        "a sandbox that is gone",
        "works; SandboxError, so a rollout without a reward",
        "test_a_sandbox_that_is_gone_is_an_error_of_the_sandbox",
    ),
)
NEMO_GYM: Table = (
    ("sandbox provider `tangram` by its entry point", "works", "test_its_registry_finds_the_provider_by_the_installed_entry_point"),
    ("Sandbox.start, exec, upload, download, status, stop", "works", "test_a_sandbox_runs_commands_moves_files_and_leaves_nothing"),
    ("Sandbox.exec (timeout_s)", "works", "test_out_of_time_is_a_result_that_says_so"),
    ("SandboxSpec.ttl_s", "works", "test_a_sandbox_ends_when_its_time_to_live_is_over"),
    (
        "a sandbox that is gone",
        "differs: exec raises, so that no agent takes an exit code for the program's",
        "test_a_sandbox_that_is_gone_raises_and_says_that_it_stopped",
    ),
    ("SandboxSpec: GPUs, entrypoint, user", "not served: SandboxCreateError", "test_what_cannot_be_had_is_refused"),
)
VERL: Table = (
    (
        "SandboxToolAgentLoop, several turns on one environment, and NaiveRewardManager with compute_score",
        "works",
        "test_a_rollout_of_several_turns_has_one_environment_which_its_score_closes",
    ),
    ("ToolAgentLoop (its own), with our tool", "works", "test_verls_own_loop_leaves_no_environment"),
    (
        "ToolAgentLoop (its own) where the stack failed",
        "differs: it stops the step; our loop begins the rollout anew",
        "test_verls_own_loop_stops_where_the_stack_failed",
        "test_a_rollout_in_which_the_stack_failed_is_started_anew",
    ),
    ("load_all_tools(function_tool_path)", "works", "test_a_function_tool_runs_in_a_sandbox_of_its_own"),
    ("reward.custom_reward_function: compute_score", "works", "test_a_solution_is_checked_beside_its_files"),
    (
        "compute_score where the stack failed",
        "differs: verl has no reward that means none, so ScoreFailed stops the step",
        "test_a_score_whose_environment_is_gone_is_an_error",
    ),
    (
        "RewardLoopWorker.compute_score_disrm (vllm), the worker itself",
        "works where the router's address is `tangram:TOKEN@HOST:PORT/services/NAME`",
        "clients/test_verl_router.py::test_verls_reward_worker_reads_a_score",
    ),
)
TRL: Table = (
    (
        "GRPOTrainer(rollout_func), with tools and rewards in sandboxes and a teacher: examples/train",
        "works; a reward of None where the stack failed, which TRL leaves out",
        "test_two_steps_have_the_same_rewards_in_sandboxes_as_in_subprocesses_and_leave_no_environment",
        "test_the_verdict_of_a_sandbox_is_the_reward",
        "test_a_rollout_that_the_stack_fails_has_no_reward",
    ),
)
TABLES: tuple[tuple[str, str, str, Table], ...] = (
    ("mini-swe-agent", "agents", "integrations/test_mini_swe_agent", MINI_SWE_AGENT),
    ("harbor", "agents", "integrations/test_harbor", HARBOR),
    ("verifiers", "verifiers", "clients/test_verifiers", VERIFIERS),
    ("nemo-gym", "nemo-gym", "integrations/test_nemo_gym", NEMO_GYM),
    ("verl", "training", "integrations/test_verl", VERL),
    ("trl", "training", "integrations/test_trl", TRL),
)
"""The client, its environment, the file with most of its tests, and its methods."""


def rows() -> Iterator[Row]:
    """Yield the rows; versions are those that the environments have."""
    for client, environment, file, table in TABLES:
        version = ENVIRONMENTS[environment].version(client)
        for method, how, *tests in table:
            yield Row(client=client, version=version, method=method, **said(how), environment=environment, tests=node(file, *tests))
    yield from javascript_rows.rows()
    yield Row(
        client="tangram-docker",
        version="of this project",
        method="run -d, exec, cp, stop, rm",
        outcome="works",
        how="of Docker's command line, what programs call that know nothing else",
        tests=node(
            "integrations/test_docker_cli",
            "test_exec_has_folder_variables_streams_and_exit_code",
            "test_files_are_copied_in_and_out",
            "test_a_container_that_was_stopped_can_be_removed_and_runs_nothing",
        ),
    )
