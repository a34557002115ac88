"""What some tests need that isn't installed everywhere; they are skipped with a reason where it isn't."""

from importlib.util import find_spec

import pytest

TIMM = [pytest.mark.timm, pytest.mark.skipif(not find_spec("timm"), reason="timm isn't installed: make test-timm")]
