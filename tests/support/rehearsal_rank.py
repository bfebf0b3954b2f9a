"""The program of a rehearsal's ranks in tests: it goes without torch, so that it starts at once.

transfer NUM_BYTES OTHER...   rank 0 sends that much to each other rank in turn, and prints one JSON line a
                              rank: seconds, and the bytes per tier that it sent meanwhile
stay FOLDER                   write the process ids of this rank and of a child into FOLDER, and sleep
exit CODE                     rank 2 ends with CODE, the others at once with 0
fail                          rank 2 says why and ends with 7, the others sleep
show                          every rank prints its environment
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from terrace.lab.rehearse.counters import read

PORT = 5000
NUM_TRANSFERS = 5


def transfer(rank: int, num_bytes: int, others: list[int]) -> None:
    """The fastest of the transfers, as other programs may use the cores; each is answered with one byte."""
    if rank in others:
        with socket.create_server(("", PORT)) as server:
            connection = server.accept()[0]
            for _ in range(NUM_TRANSFERS):
                left = num_bytes
                while left:
                    left -= len(connection.recv(min(left, 1 << 20)))
                connection.sendall(b".")
            connection.recv(1)
    elif rank == 0:
        for other in others:
            connection = _connect(other)
            before, taken_s = read(), []
            for _ in range(NUM_TRANSFERS):
                time.sleep(0.05)  # what the links let through at once comes back
                begin_s = time.perf_counter()
                connection.sendall(bytes(num_bytes))
                connection.recv(1)
                taken_s.append(time.perf_counter() - begin_s)
            sent = {index: count - before[index] for index, count in read().items()}
            print(json.dumps({"other": other, "seconds": min(taken_s), "sent": sent}), flush=True)
            connection.close()


def _connect(other: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((f"10.99.0.{other + 1}", PORT))
        except ConnectionRefusedError:  # it has not come so far
            time.sleep(0.05)


def main(word: str, *arguments: str) -> None:
    """Run the command `word`."""
    rank = int(os.environ["RANK"])
    if word == "transfer":
        transfer(rank, int(arguments[0]), [int(other) for other in arguments[1:]])
    elif word == "stay":
        child = subprocess.Popen(["sleep", "300"])
        (Path(arguments[0]) / f"{rank}.new").write_text(f"{os.getpid()} {child.pid}")
        (Path(arguments[0]) / f"{rank}.new").rename(Path(arguments[0]) / f"{rank}")
        time.sleep(300)
    elif word == "exit":
        sys.exit(int(arguments[0]) if rank == 2 else 0)
    elif word == "fail":
        if rank == 2:
            print("ValueError: two is one too many", file=sys.stderr)
            sys.exit(7)
        time.sleep(300)
    else:
        print(rank, os.environ["WORLD_SIZE"], os.environ["GLOO_SOCKET_IFNAME"], sorted(os.listdir("/sys/class/net")))


if __name__ == "__main__":
    main(*sys.argv[1:])
