from tests.load.conftest import failures, names_of, pytest_generate_tests  # noqa: F401
