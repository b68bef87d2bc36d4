"""The replica's object, without Serve: what happens where it cannot be made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decode_service import app
from decode_service.config import ServiceConfig


# Python calls the coroutine function once more, when the object goes, and awaits nothing.
@pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited:RuntimeWarning")
def test_a_replica_without_an_engine_ends_without_a_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve logs what ``__del__`` raises, beside the error that matters."""

    def broken(model: str) -> None:
        raise ValueError("no metrics here")

    monkeypatch.setattr(app, "RayMetrics", broken)
    # For the whole process, which has other tests.
    monkeypatch.setattr(app, "_log_like_serve", lambda: None)
    config = ServiceConfig.model_validate({"model": {"name": "demo", "source": "builtin:demo"}})

    async def test() -> None:
        replica: Any = app.DecodeService.__new__(app.DecodeService)
        with pytest.raises(ValueError, match="no metrics here"):
            await replica.__init__(config)
        await replica.__del__()

    asyncio.run(test())
