"""Raddle inside serving engines; a package each, which imports the engine it is for. `paged` is what they share."""
