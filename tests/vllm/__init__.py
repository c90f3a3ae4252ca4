"""Engines behind vLLM servers: here a made-up server that can do everything wrong, in `real/` vLLM itself."""
