"""transformers' `generate` and `generate_batch` with several attention implementations in turns: `raddle bench generate`."""
