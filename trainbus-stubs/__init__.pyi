# What trainbus.py exports, for type checkers: a module, unlike a package, cannot hold the mark py.typed.

from eventloop import *
from eventloop.bridges.ignite_saver import TrainbusSaver as TrainbusSaver
from eventloop.events import *
from eventloop.events.mount_points import *
from hooks import *

__version__: str

def main() -> int: ...
