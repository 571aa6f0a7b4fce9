"""Switches on the checks of the shape annotations for the whole suite, before softvq is imported."""

from jaxtyping import install_import_hook

install_import_hook("softvq", "beartype.beartype")
