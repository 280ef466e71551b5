"""vLLM with several attention backends in turns: `raddle bench serve`."""
