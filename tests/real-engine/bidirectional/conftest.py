"""The pair of this folder. It starts once, as engines take longer to start than most tests take."""

import pytest

from support import pairs


@pytest.fixture(scope="package")
def pair():
    with pairs.running("bidirectional", "BIDIRECTIONAL") as pair:
        yield pair
