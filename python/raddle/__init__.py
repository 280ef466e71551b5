"""An attention engine for LLM inference serving."""

from raddle import _library

__version__: str = _library.version()
