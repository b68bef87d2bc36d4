"""Pixels to files: PNG, JPEG, WebP and MP4.

It knows numpy arrays of uint8 and nothing else: no HTTP, no torch, no Ray, no models. Pillow and PyAV are optional and
imported when a format needs them.
"""
