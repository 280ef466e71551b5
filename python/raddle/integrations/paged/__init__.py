"""What backends of engines with a paged KV cache share: layers as specs, and a step's plans. Imports no engine."""
