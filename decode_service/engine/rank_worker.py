"""One rank, as a plain object: its decoder, its communicator, and failures turned into values.

The in-process group calls it in a thread, the Ray group in an actor of its own. Knows no Ray.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

import numpy as np
import torch
import torch.distributed as dist

from decode_service.config import ServiceConfig
from decode_service.decoding.communicator import Communicator, SoloCommunicator
from decode_service.decoding.compilation import use_cache_dir
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.process_group import join_group
from decode_service.decoding.rank import RankDecoder
from decode_service.engine.failures import describe_failure, free_memory
from decode_service.engine.places import RankPlace
from decode_service.engine.protocol import GroupInfo, RankFailure, RankPixels, RankTask
from decode_service.planning.spec import StrideTiles


class RankWorker:
    """One rank of a group. ``load`` comes first (again where the ranks have to agree), then ``attach`` or ``join``, then any
    number of ``decode``.

    Only ``abort`` may be called while another method runs.
    """

    def __init__(self, config: ServiceConfig, place: RankPlace) -> None:
        self.config = config
        self.place = place
        # Each rank process sees one device only (Ray's isolation), which is then number 0.
        self.device = torch.device("cuda:0" if config.group.device == "cuda" else "cpu")
        self._decoder: RankDecoder | None = None
        self._communicator: Communicator | None = None

    @property
    def decoder(self) -> RankDecoder:
        if self._decoder is None:
            raise RuntimeError("load the model first")
        return self._decoder

    def load(self, compile_enabled: bool, measure: bool = True, without: Collection[str] = frozenset()) -> GroupInfo:
        """Load the model, in place of one that was loaded before.

        Args:
            compile_enabled: whether it may be compiled.
            measure: whether to measure what it takes of memory and time too, which a group that recovers knows already.
            without: rewrites to leave off, whatever the settings say.

        Raises:
            Exception: whatever loading raises, with a message for the operator.
        """
        model, tile = self.config.model, self.config.policy.tile
        if self._decoder is not None:
            # The device may not hold two.
            self._decoder = None
            free_memory()
        if compile_enabled:
            use_cache_dir(self.config.compile.cache_dir)
        self._decoder = RankDecoder.load(
            ModelSource(
                name=model.name,
                source=model.source,
                subfolder=model.subfolder,
                dtype=self.config.torch_dtype_name(),
                class_name=model.class_name,
                revision=model.revision,
            ),
            device=str(self.device),
            tiles=None if tile is None else StrideTiles(tile.size_px, tile.stride_px),
            compile_enabled=compile_enabled,
            cuda_graphs=self.config.compile.cuda_graphs,
            rewrites=[name for name in self.config.rewrites.enabled() if name not in without],
            threads=self._threads(),
        )
        # One rank speaks for all.
        spec = self._decoder.measured_spec() if measure and self.place.rank == 0 else self._decoder.spec
        return GroupInfo(spec, {**self._decoder.describe(), "device_memory_bytes": self._device_memory_bytes()})

    def _device_memory_bytes(self) -> int | None:
        """Memory of this rank's device; None for the CPU's, which the ranks share with everything else."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def attach(self, communicator: Communicator) -> None:
        """Decode with the peers that ``communicator`` joins."""
        self.decoder.attach(communicator)
        self._communicator = communicator

    def join(self, store: dist.Store, generation: int) -> None:
        """Form a new communicator with all other ranks, which must call this too."""
        # The old one first, whatever its state: torch has one default group per process, so closing the old one after
        # the new one has formed would close the new one.
        self._communicator = None
        with contextlib.suppress(RuntimeError):
            self.decoder.attach(SoloCommunicator())
        self.attach(
            join_group(
                store,
                self.place.rank,
                self.place.size,
                self.device,
                generation=generation,
                timeout_s=self.config.group.collective_timeout_s,
                agreement_timeout_s=max(self.config.run_limit_s(measure=on) for on in (False, True)),
            )
        )

    def decode(self, task: RankTask, latents: np.ndarray, dtype: str) -> RankPixels | RankFailure:
        """Carry out this rank's share of ``task``. Never raises: see ``RankFailure``.

        Args:
            latents: the whole request's latents, possibly read-only; bfloat16 as the uint16 of its bits.
            dtype: their dtype.
        """
        begun = time.perf_counter()
        failure: RankFailure | None = None
        try:
            part = self.decoder.decode(
                task.plan,
                latents,
                dtype,
                arrangement=task.arrangement,
                denormalize=task.denormalize,
                conditioning=task.conditioning,
                seeds=task.seeds,
                pixels=task.pixels,
                precision=task.precision,
                eager=task.eager,
                measure=task.measure,
            )
        except Exception as error:
            failure = describe_failure(error)
        if failure is not None:
            free_memory()
            return failure
        timings = {**part.timings_ms, "decode": (time.perf_counter() - begun) * 1e3}
        return RankPixels(
            part.array, part.finite, part.digest, timings, part.compiled, part.measured, part.finite_items
        )

    def abort(self) -> None:
        """Make pending collectives fail soon. Callable from another thread, while ``decode`` runs."""
        communicator = self._communicator
        if communicator is not None:
            # A rank that failed by itself has aborted already, and then there may be nothing left to abort.
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                communicator.abort()

    def disable_compile(self, reason: str) -> None:
        self.decoder.disable_compile(reason)

    def use_compiled(self, keys: frozenset[str]) -> None:
        self.decoder.use_compiled(keys)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()

    def _threads(self) -> int | None:
        """Torch threads of this rank. Ray starts workers with OMP_NUM_THREADS=1, so the number has to be set."""
        if self.config.group.threads is not None:
            return self.config.group.threads
        if self.device.type != "cpu":
            return None
        return max(1, len(os.sched_getaffinity(0)) // self.place.ranks_on_node)
