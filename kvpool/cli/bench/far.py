"""`python -m kvpool.cli.bench.far PORT BYTES`: the far end of `limits.RawTcp`, until its client hangs up."""

import socket
import sys

import numpy as np

from kvpool.cli.bench.limits import REQUEST, receive


def main(port: int, nbytes: int) -> None:
    """Connect to whoever started this and do as it asks."""
    memory = np.ones(nbytes, np.uint8).data
    head = bytearray(REQUEST.size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1, socket.MSG_PEEK):
            receive(connection, memoryview(head))
            kind, count, size, offset = REQUEST.unpack(head)
            for start in range(offset, offset + count * size, size):
                if kind == b"r":
                    connection.sendall(memory[start : start + size])
                else:
                    receive(connection, memory[start : start + size])
            if kind == b"w":
                connection.sendall(b"k")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
