"""A package, so that measure/ can import tests.support."""
