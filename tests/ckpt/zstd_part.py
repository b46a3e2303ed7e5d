#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Parts of codec zstd read without Belay: by the stock zstd command and the lines of
docs/format.md, compared with the same state saved without a codec.

Usage: zstd_part.py TEST_CKPT_CODEC (the program that writes both)
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

WIDTHS = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1}


def unzstd(data):
    return subprocess.run(["zstd", "-dcq"], input=data, stdout=subprocess.PIPE, check=True).stdout


def safetensors(data):
    """Header and entries as {key: (dtype, shape, bytes)}; the file must be exact."""
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + n])
    assert (8 + n) % 4096 == 0
    meta = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in meta.values())
    end = 0
    entries = {}
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        lo, hi = entry["data_offsets"]
        elems = 1
        for size in entry["shape"]:
            elems *= size
        assert lo == end and hi - lo == elems * WIDTHS[entry["dtype"]], key
        end = hi
        entries[key] = (entry["dtype"], entry["shape"], data[8 + n + lo:8 + n + hi])
    assert 8 + n + end == len(data)
    return meta, entries


def words(shape, planes):
    """Undoes planes: U8 [chunks, width, elements] to the words' bytes."""
    chunks, width, elems = shape
    out = bytearray(len(planes))
    for chunk in range(chunks):
        base = chunk * width * elems
        for plane in range(width):
            at = base + plane * elems
            out[base + plane:base + width * elems:width] = planes[at:at + elems]
    # Each word rotated right by one, all in one large number.
    number = int.from_bytes(out, "little")
    ones = int.from_bytes((1).to_bytes(width, "little") * (len(out) // width), "little")
    low = number & ones
    rotated = (number - low >> 1) | low << 8 * width - 1
    return rotated.to_bytes(len(out), "little")


def restore(meta, entries):
    """Every extent's bytes by its key, planes undone."""
    found = {}
    for key, (dtype, shape, data) in entries.items():
        if key.endswith("@tail"):
            continue
        if key in meta and dtype == "U8":
            data = words(shape, data)
            if key + "@tail" in entries:
                tail_dtype, tail_shape, tail = entries[key + "@tail"]
                planed = tail_dtype == "U8"
                assert planed or tail_dtype == meta[key].split("[")[0]
                data += words(tail_shape, tail) if planed else tail
            dtype, shape = meta[key].split("[")[0], json.loads("[" + meta[key].split("[")[1])
        found[key] = (dtype, shape, data)
    return found


def with_numpy(path, plain):
    """The lines of docs/format.md, where the stock packages are at hand."""
    try:
        import numpy as np
        from safetensors import safe_open
    except ImportError:
        return False
    with safe_open(path, "np") as f:
        meta, names = f.metadata(), f.keys()

        def flat(key):
            def words(a):
                w = a.transpose(0, 2, 1).reshape(-1).view(f"<u{a.shape[1]}")
                return w >> 1 | w << (8 * a.shape[1] - 1)

            types = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2"}
            dtype = types[meta[key].split("[")[0]]
            parts = [words(f.get_tensor(key)).view(dtype)]
            if key + "@tail" in names:
                tail = f.get_tensor(key + "@tail")
                parts.append(words(tail).view(dtype) if tail.dtype == "uint8" else tail)
            return np.concatenate(parts)

        for key in meta:
            if key in plain:
                assert flat(key).tobytes() == plain[key][2], key
    return True


def seek(data, raw):
    """Reads a range in the middle by the seek table alone."""
    entries, descriptor, magic = struct.unpack_from("<IBI", data, len(data) - 9)
    assert magic == 0x8F92EAB1 and descriptor == 0
    table = len(data) - 9 - 8 * entries - 8
    skippable, size = struct.unpack_from("<II", data, table)
    assert skippable == 0x184D2A5E and table + 8 + size == len(data)
    frames = []
    stored = decoded = 0
    for i in range(entries):
        a, b = struct.unpack_from("<II", data, table + 8 + 8 * i)
        frames.append((stored, a, decoded, b))
        stored += a
        decoded += b
    assert stored == table and decoded == len(raw)
    lo, hi = len(raw) // 2 - 777, len(raw) // 2 + 300000
    need = [f for f in frames if f[2] < hi and f[2] + f[3] > lo]
    assert 0 < len(need) < len(frames) // 2
    got = b"".join(unzstd(data[a:a + n]) for a, n, _, _ in need)
    assert got[lo - need[0][2]:hi - need[0][2]] == raw[lo:hi]


def main():
    if shutil.which("zstd") is None:
        print("skipped: no zstd command")
        return 77
    with tempfile.TemporaryDirectory() as root:
        env = dict(os.environ, BELAY_CODEC_WRITE=root)
        subprocess.run([sys.argv[1]], env=env, check=True)
        planes = numpy = 0
        for part in ("part-0000", "part-0001"):
            with open(f"{root}/step-000000000001.g1/{part}.safetensors", "rb") as f:
                plain = safetensors(f.read())[1]
            with open(f"{root}/step-000000000002.g1/{part}.safetensors.zst", "rb") as f:
                data = f.read()
            raw = unzstd(data)
            meta, entries = safetensors(raw)
            assert meta["format"] == "belay" and meta["codec"] == "zstd"
            planes += sum(1 for key in meta if key in entries)
            assert restore(meta, entries) == plain
            with open(f"{root}/{part}", "wb") as f:
                f.write(raw)
            numpy += with_numpy(f"{root}/{part}", plain)
            seek(data, raw)
        assert planes >= 12
        print(f"{planes} tensors restored; with numpy and safetensors: {'yes' if numpy else 'no'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
