"""A launch costs more than a load: one launch does all that the chosen tests want of a layout."""

import pytest


@pytest.fixture(scope="module")
def chosen(request):
    """{(stage, ranks): [name]} of the tests of this module that are to run."""
    names = {}
    for item in request.session.items:
        if item.path == request.path and "chosen" in item.fixturenames:
            parameters = item.callspec.params
            layout = parameters["stage"], parameters["ranks"]
            names.setdefault(layout, []).append(parameters["name"])
    return names
