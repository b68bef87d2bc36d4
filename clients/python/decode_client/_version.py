"""The version, where the build and the client's User-Agent both find it."""

__version__ = "0.1.0"
