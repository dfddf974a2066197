"""Put on the path of every process that the tests start: the garbage collector rarely looks for garbage in imports.

Otherwise a third of the processor time of a rank that takes a few steps is spent on it, at imports and at the end.
"""

import atexit
import gc

gc.set_threshold(200_000, 50, 1000)
atexit.register(gc.freeze)
