"""Raddle as an attention implementation of transformers: ``attn_implementation="raddle"``.

::

    import raddle.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="raddle")

Importing this module registers the names "raddle" (`generate`, `forward`) and "paged|raddle" (`generate_batch`). The
masks that transformers composes stay functions: no matrix of rows and keys is made. Paged caches are read where they
lie.
"""

from __future__ import annotations

import logging

import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from raddle.integrations.transformers.continuous import admit, attend_either
from raddle.integrations.transformers.masks import make_mask
from raddle.integrations.transformers.paged import attend_paged

__all__ = ["register"]

#: Versions of transformers that the integration was tried with.
TRIED = ("5.17.", "5.18.", "5.24.")

_logger = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """Registers "raddle" and "paged|raddle" with transformers, as importing this module does.

    A version of transformers that was not tried is named in a warning, once.

    Example:
        >>> import raddle.integrations.transformers as integration
        >>> integration.register()
        >>> from transformers import AttentionInterface
        >>> "raddle" in AttentionInterface(), "paged|raddle" in AttentionInterface()
        (True, True)
    """
    global _registered
    if _registered:
        return
    AttentionInterface.register("raddle", attend_either)
    AttentionMaskInterface.register("raddle", make_mask)
    AttentionInterface.register("paged|raddle", attend_paged)
    admit()
    if not transformers.__version__.startswith(TRIED):
        tried = ", ".join(f"{version}x" for version in TRIED)
        _logger.warning("raddle was tried with transformers %s; this is %s", tried, transformers.__version__)
    _registered = True


register()
