"""HTTP in front of a ``DecodeService``: ``create_app`` makes the FastAPI application.

It knows the wire format, the service protocol and media, and neither Ray nor torch: all of it runs and is tested without
them.
"""

from decode_service.http.app import create_app

__all__ = ["create_app"]
