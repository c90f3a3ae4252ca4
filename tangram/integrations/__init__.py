"""Classes with which frameworks of agentic RL run their sandboxes on a stack, without the gateway.

| module | framework | what |
|---|---|---|
| `mini_swe_agent` | mini-swe-agent | an environment class |
| `docker_cli` | mini-swe-agent and others | `tangram-docker`, in the place of the command `docker` |
| `harbor` | Harbor, and what runs Harbor's tasks | an environment class |
| `verl`, `verl_reward` | verl | tool, function tool, agent loop, reward function |
| `nemo_gym` | NeMo Gym | a sandbox provider |
| `uni_agent` | uni-agent | a sandbox |

Each module imports its framework, and nothing else does: this package is as light as the client. What they share: `actions` describes,
`sandbox` carries out. In all of them a program's failure is a result, and a failure of the stack is an exception, never a score.
"""
