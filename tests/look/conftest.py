from tests.support.fixtures import tmp_path  # noqa: F401
