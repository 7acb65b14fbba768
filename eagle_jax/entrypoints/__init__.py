"""What people call: `LLM`, `AsyncLLM`, `generate`, `speculative_generate` and `stream_generate`."""
