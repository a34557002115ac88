"""What every process of the tests does first, children too: it has the names of torchvision's operators before that is imported."""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder


class _Names(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision.extension":
            import_module("torchvision_names")
        # Where it lies others say.


sys.meta_path.insert(0, _Names())
