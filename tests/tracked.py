"""Bytes that are counted while they live."""


class Tracked(bytes):
    """An image's bytes; how many there are is counted."""

    alive = most = 0

    def __init__(self, *_):
        type(self).alive += 1
        type(self).most = max(self.most, self.alive)

    def __del__(self):
        type(self).alive -= 1
