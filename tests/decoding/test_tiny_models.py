"""The registry of tiny models has one of every class, and each decodes to pixels on which a tolerance means something."""

from __future__ import annotations

import pytest
import torch

from decode_service.decoding.families import FAMILIES
from tests.decoding.family_checks import decoded, is_varied
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import TINY, latent_shape


def test_every_class_has_a_tiny_model() -> None:
    assert set(TINY) == set(FAMILIES)


@pytest.mark.parametrize("class_name", TINY)
def test_it_is_of_its_class_and_its_pixels_are_no_flat_picture_nor_much_more_than_one(class_name: str) -> None:
    vae = TINY[class_name]()
    assert type(vae).__name__ == class_name and not vae.training
    assert not any(parameter.requires_grad for parameter in vae.parameters())
    assert all(torch.equal(a, b) for a, b in zip(vae.parameters(), TINY[class_name]().parameters(), strict=True))
    shape = latent_shape(FAMILIES[class_name](vae, "tiny").spec)
    _, pixels = decoded(vae, latents_of(shape), "auto")
    assert is_varied(pixels) and pixels.std() < 0.7, pixels.std()
