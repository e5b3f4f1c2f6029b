# SPDX-License-Identifier: Apache-2.0
"""A network that goes away without a word, in a network namespace: both sides notice by the
silence, and all is well once it is back."""

from __future__ import annotations

from tests.faults.namespaces import run_apart

PROGRAM = """
import fcntl, os, socket, struct, subprocess, sys, time
from tests.conftest import Backend
from tests.pair.raw import eventually

def loopback(up):
    "What `ip link set lo up` does (SIOCGIFFLAGS, SIOCSIFFLAGS; IFF_UP)."
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name, _, flags = b"lo", None, struct.unpack_from(
            "16xh", fcntl.ioctl(any_socket, 0x8913, struct.pack("16sh22x", b"lo", 0))
        )[0]
        flags = flags | 1 if up else flags & ~1
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", name, flags))

CLIENT = '''
import sys, time
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
data = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)

def check():
    back = np.zeros_like(data)
    error, device = cudart.cudaMalloc(data.nbytes)
    errors = [error]
    for where, what, kind in (
        (device, data, K.cudaMemcpyHostToDevice), (back, device, K.cudaMemcpyDeviceToHost)
    ):
        errors.append(cudart.cudaMemcpy(where, what, data.nbytes, kind)[0] if not errors[-1] else 0)
    errors.append(cudart.cudaFree(device)[0] if not error else 0)
    code = max(int(e) for e in errors)
    assert code or (back == data).all(), "wrong bytes"
    return code

assert check() == 0, flyt.last_failure()
print("ready", flush=True)
code = 0
while not code:
    code = check()
began = time.monotonic()
assert check() == code, "it is lost for good"
assert time.monotonic() - began < 5, "and says so at once"
print(code, flush=True)
sys.stdin.readline()
flyt.connect()
print(check(), flush=True)
'''

loopback(True)
device, *extra = sys.argv[1:]
backend = Backend(
    device, listen=["tcp://127.0.0.1:0", "ipc:///tmp/flyt-net-%d.sock" % os.getpid()],
    extra=["--heartbeat", "1", *extra],
)
from tests.pair import raw
from flyt.rpc import messages as m

def sessions():
    report = raw.say(backend.endpoints[1], m.AskStatus()).report
    return report["sessions"]

try:
    environment = {**os.environ, **backend.env, "FLYT_BACKEND": backend.endpoint}
    client = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CLIENT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )
    assert client.stdout.readline() == "ready\\n"
    assert len(sessions()) == 1
    loopback(False)
    code = client.stdout.readline()
    assert code == "46\\n", code
    assert eventually(lambda: not sessions(), 20), "the daemon has given it up, too"
    loopback(True)
    client.stdin.write("\\n")
    client.stdin.flush()
    assert client.stdout.readline() == "0\\n", "a new session works"
    client.stdin.close()
    assert client.wait(30) == 0
    backend.stop()
finally:
    backend.dispose()
print("sound")
"""


def test_a_network_that_goes_away_and_comes_back(device_kind: str) -> None:
    assert run_apart(PROGRAM, device_kind, network=True) == "sound\n"


def test_the_same_with_the_bytes_in_the_messages(device_kind: str) -> None:
    assert run_apart(PROGRAM, device_kind, "--no-region", network=True) == "sound\n"
