# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's distributed checkpoint and the safetensors package on the tensors of a part.

usage: peers.py PART DIR

Reads PART (a plain safetensors file) into memory, and then, for each line on standard input but
"quit", saves and loads those tensors once by each way under DIR, durably, with caches dropped
before reads, and prints one JSON object with the milliseconds. What comes back is compared.
"""
import json
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file


def tensors_read(path):
    """The tensors of a plain safetensors file, by the format alone."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    base = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    state = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32", entry
        lo, hi = (8 + size + at for at in entry["data_offsets"])
        state[name] = base[lo:hi].view(torch.float32).reshape(entry["shape"])
    return state


def files_of(path):
    if os.path.isfile(path):
        return [path]
    return [os.path.join(d, f) for d, _, names in os.walk(path) for f in names]


def settle(path, drop):
    """Files and their directory to the disk; with `drop` out of the page cache too."""
    for name in files_of(path) + [os.path.dirname(path)]:
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        if drop:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(work):
    begun = time.monotonic()
    work()
    return 1000 * (time.monotonic() - begun)


def check(state, loaded):
    for name, tensor in state.items():
        assert torch.equal(tensor, loaded[name]), name


def measure(state, loaded, path):
    def dcp_save():
        dcp.save(state, checkpoint_id=path)

    def dcp_async_save():
        dcp.async_save(state, checkpoint_id=path).result()

    def dcp_load():
        dcp.load(loaded, checkpoint_id=path)

    def st_save():
        save_file(state, path)
        settle(path, drop=False)

    def st_load():
        for name, tensor in load_file(path).items():
            loaded[name].copy_(tensor)

    took = {}
    for save, load, name in (
        (dcp_save, dcp_load, "dcp"),
        (dcp_async_save, None, "dcp_async"),
        (st_save, st_load, "safetensors"),
    ):
        took[name + "_save_ms"] = timed(save)
        if load is not None:
            settle(path, drop=True)
            for tensor in loaded.values():
                tensor.zero_()
            took[name + "_load_ms"] = timed(load)
            check(state, loaded)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return took


def main():
    part, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=0, world_size=1)
    state = {name: tensor.clone() for name, tensor in tensors_read(part).items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    print(json.dumps({"did": "peers", "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        print(json.dumps(measure(state, loaded, folder + "/peer")), flush=True)
    dist.destroy_process_group()


main()
