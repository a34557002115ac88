"""What every process of the tests does first, children too: it has the names of torchvision's operators before that is imported.

But with a torch for CUDA, which torchvision's own operators are made for: two definitions of one operator end the process.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder


class _Names(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision.extension" and import_module("torch").version.cuda is None:
            import_module("torchvision_names")
        # Where it lies others say.


sys.meta_path.insert(0, _Names())
