"""What a replica exports through Ray, on the ``/metrics`` of its node; see ``DecodeObserver`` for what the engine tells."""

from __future__ import annotations

from ray.serve import metrics

DECODE_SECONDS = "decode_service_decode_seconds"
DECODED_REQUESTS = "decode_service_decoded_requests"
ACTUAL_TO_PREDICTED = "decode_service_decode_actual_to_predicted"

#: Upper bounds of histogram buckets, in seconds: from a preview on one rank to a long video on a few.
SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]

#: Ratios that are as far from 1 upwards as downwards.
RATIOS = [0.125, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0]


class RayMetrics:
    """A ``DecodeObserver`` whose metrics are Ray's, by model and mode. Ray puts ``ray_`` before their names.

    Several requests that share a pass are one observation of its time, so that times add up to what the ranks were busy; how many
    requests there were is counted beside it.

    Inside a replica Serve adds the names of application, deployment and replica.
    """

    def __init__(self, model: str) -> None:
        self._seconds = metrics.Histogram(
            DECODE_SECONDS,
            description="Seconds that the ranks took to decode a request, or several in one pass, without queue and transfer.",
            boundaries=SECONDS,
            tag_keys=("model", "mode"),
        )
        self._requests = metrics.Counter(
            DECODED_REQUESTS,
            description="Requests that the ranks decoded, alone or several in one pass.",
            tag_keys=("model", "mode"),
        )
        self._ratio = metrics.Histogram(
            ACTUAL_TO_PREDICTED,
            description="Seconds that the ranks took over those that the plan predicted.",
            boundaries=RATIOS,
            tag_keys=("model", "mode"),
        )
        for metric in (self._seconds, self._requests, self._ratio):
            metric.set_default_tags({"model": model})

    def decoded(self, mode: str, seconds: float, predicted_seconds: float | None, requests: int) -> None:
        """See ``DecodeObserver``."""
        self._seconds.observe(seconds, tags={"mode": mode})
        self._requests.inc(requests, tags={"mode": mode})
        if predicted_seconds:
            self._ratio.observe(seconds / predicted_seconds, tags={"mode": mode})
