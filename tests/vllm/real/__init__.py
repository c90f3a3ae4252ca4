"""vLLM itself, in an environment of its own that `make test-vllm` builds."""
