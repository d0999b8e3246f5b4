from tests.support.fixtures import laid_out, tmp_path  # noqa: F401
