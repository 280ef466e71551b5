"""Signatures as tests/peer_signatures.py records them."""

import inspect


def spelled(function):
    """["q", "causal=False", "*args", "out=None"]"""
    found = []
    for each in inspect.signature(function).parameters.values():
        default = "" if each.default is each.empty else f"={each.default!r}"
        found.append(f"{'*' if each.kind is each.VAR_POSITIONAL else ''}{each.name}{default}")
    return found
