"""Measure an exchange of a federation over gRPC, without computation: a coordinator and three sites on loopback.

Each exchange sends an array to every site and receives one of the same size. For comparison, plain gRPC streams send
the same bytes in the same pieces, in the same run and between the same kinds of processes.

    python benchmarks/federation.py
"""

import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from rookery.engines.federation import wire
from rookery.engines.federation.links import Links, Request
from rookery.engines.federation.transports import grpc as network
from rookery.engines.federation.transports import grpc_site

NAMES = ("a", "b", "c")
SIZES = {"4 KB": (4_000, 300, 0.003), "1 MB": (1_000_000, 60, 0.03), "100 MB": (100_000_000, 4, 3.0)}


def echo(message: bytes) -> bytes:
    """A site that sends back what it receives."""
    header, arrays = wire.decode(message)
    return wire.encode({"answer": "value", "number": header["number"], "work": []}, arrays)


def site(name: str, address: str) -> None:
    """Run a site's process."""
    with contextlib.suppress(grpc_site.JoinError):
        grpc_site.join(echo, lambda: False, name, address, None, lambda text: None, patience=3.0)


def ours() -> dict[str, list[float]]:
    """Return the seconds of exchanges, through everything except the plan."""
    transport = network.GrpcServer("127.0.0.1:0", NAMES, None, True)
    transport.limit = 1 << 30
    sites = [multiprocessing.Process(target=site, args=(name, transport.address), daemon=True) for name in NAMES]
    for process in sites:
        process.start()
    links = Links(transport, patience=60.0)
    shapes: list[Any] = []

    def check(i: int, reply: Any) -> str | None:
        return None if [a.shape for a in reply.arrays] == shapes else "wrong"

    def exchange(array: np.ndarray) -> None:
        shapes[:] = [array.shape]
        number = links.number()
        messages = wire.encode_each({"do": "work", "number": number}, [array], [[] for _ in NAMES])
        links.ask({i: Request(number, message) for i, message in enumerate(messages)}, check=check)

    found = {name: timed(exchange, size, count) for name, (size, count, _) in SIZES.items()}
    transport.close()
    ended(sites)
    return found


def bare_site(address: str) -> None:
    """Run a site with gRPC only, which sends pieces back as they come."""
    channel = grpc.insecure_channel(address, options=network.OPTIONS)
    out: Any = network.queue.SimpleQueue()
    stream = channel.stream_stream("/bare/Join")(iter(out.get, None))
    with contextlib.suppress(grpc.RpcError):
        for piece in stream:
            out.put(piece)
    out.put(None)


def bare() -> dict[str, list[float]]:
    """Return the seconds of exchanges of plain gRPC streams."""
    queues = [network.queue.SimpleQueue() for _ in NAMES]
    back: Any = network.queue.SimpleQueue()
    free = iter(queues)

    def join(requests: Any, context: Any) -> Any:
        own = next(free)

        def read() -> None:
            with contextlib.suppress(Exception):
                for piece in requests:
                    back.put(piece)

        network.threading.Thread(target=read, daemon=True).start()
        yield from iter(own.get, None)

    server = grpc.server(network.futures.ThreadPoolExecutor(8), options=network.OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(join)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Join": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sites = [multiprocessing.Process(target=bare_site, args=(f"127.0.0.1:{port}",), daemon=True) for _ in NAMES]
    for process in sites:
        process.start()

    def exchange(array: np.ndarray) -> None:
        parts = wire.cut([array.data.cast("B")])
        for own in queues:
            for part in parts:
                own.put(part)
        for _ in range(len(parts) * len(NAMES)):
            back.get(timeout=60.0)

    found = {name: timed(exchange, size, count) for name, (size, count, _) in SIZES.items()}
    for own in queues:
        own.put(None)
    server.stop(1.0).wait()
    ended(sites)
    return found


def timed(exchange: Callable[[np.ndarray], None], size: int, count: int) -> list[float]:
    """Return the seconds of each exchange of an array of so many bytes, except for the first."""
    array = np.random.default_rng(0).random(size // 8)
    seconds = []
    for _ in range(count + 1):
        begin = time.perf_counter()
        exchange(array)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def ended(processes: list[Any]) -> None:
    """Wait for the processes, but not for long."""
    for process in processes:
        process.join(5.0)
        process.kill()


def main() -> int:
    """Measure, and print a table."""
    alone, whole = bare(), ours()
    print(f"{'exchange':10} {'wanted':>10} {'median':>10} {'best':>10} {'gRPC alone':>12} {'ratio':>6}")
    slow = 0
    for name, (_, _, wanted) in SIZES.items():
        median, base = statistics.median(whole[name]), statistics.median(alone[name])
        slow += median > wanted
        row = [f"{1e3 * value:.2f} ms" for value in (wanted, median, min(whole[name]), base)]
        print(f"{name:10} {row[0]:>10} {row[1]:>10} {row[2]:>10} {row[3]:>12} {median / base:6.2f}")
    return int(slow > 0)


if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["rookery.engines.federation.transports.grpc"])
    sys.exit(main())
