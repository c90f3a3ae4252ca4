"""vLLM itself, in an environment of its own that `make test-real ONLY=vllm` builds."""
