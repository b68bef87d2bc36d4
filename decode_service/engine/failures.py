"""What an exception inside a rank means for the group. Runs where torch is: in the rank itself."""

from __future__ import annotations

import gc
import traceback

import torch
import torch.distributed as dist

from decode_service.decoding.attempt import PeerFailedError, RankOutOfMemoryError
from decode_service.decoding.communicator import CommunicatorAborted
from decode_service.decoding.compilation import CompileFailedError
from decode_service.decoding.memory import is_out_of_memory
from decode_service.engine.protocol import RankErrorKind, RankFailure
from decode_service.errors import ConfigError

# torch raises plain RuntimeErrors; these are the words by which they can be told.
_COLLECTIVE_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "socket timeout")


def kind_of(error: BaseException) -> RankErrorKind:
    """The kind of failure that ``error`` is."""
    text = str(error).lower()
    if isinstance(error, CompileFailedError):
        return "compile"
    if isinstance(error, RankOutOfMemoryError) or is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, (CommunicatorAborted, PeerFailedError, dist.DistError)):
        return "collective"
    if isinstance(error, RuntimeError) and any(words in text for words in _COLLECTIVE_WORDS):
        return "collective"
    return "raised"


def describe_failure(error: BaseException) -> RankFailure:
    """``error`` as a value that keeps none of its frames alive."""
    # A wrong setting is the operator's to mend; where in the code it was noticed only hides what it says.
    trace = "" if isinstance(error, ConfigError) else "\n" + "".join(traceback.format_exception(error))
    bucket = error.bucket if isinstance(error, CompileFailedError) else ""
    return RankFailure(kind_of(error), f"{type(error).__name__}: {error}", trace, bucket)


def free_memory() -> None:
    """Give the memory of a failed attempt back to the device. Call it outside the ``except`` block.

    Inside it the exception still holds the frames, and these the tensors.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
